"""SentencePiece models, and what the sentencepiece library makes of texts -> tests/fixtures/sentencepiece.

`bpe` is as that of Llama: byte-level fallback, a dummy prefix, spaces as they are. `folded` is normalised (NFKC) and drops extra spaces, without
byte fallback. `unigram` is a unigram model.
"""

import io
import json
import random
from pathlib import Path

import sentencepiece

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "sentencepiece"
HERE = Path(__file__).resolve().parent
LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}
MODELS = {
    "bpe": {"model_type": "bpe", "vocab_size": 520, **LLAMA, "user_defined_symbols": ["<|fim|>"], "allow_whitespace_only_pieces": True},
    "folded": {"model_type": "bpe", "vocab_size": 300, "normalization_rule_name": "nmt_nfkc"},
    "unigram": {"model_type": "unigram", "vocab_size": 480, **LLAMA, "add_dummy_prefix": False},
}
TEXTS = [
    "", " ", "  ", "a", " a", "a ", "  two  spaces ", "def add(a, b):\n    return a + b\n", "\tx = 1\r\n", "ﬁne ½ Ａ", "naïve 刄🦀 é",
    "1234567 + 89", "▁lower▁", "for i in range(10):\n        print(i)\n\n\n", "\u00a0nbsp\u3000wide", "\x00\x01",
]


def texts():
    source = (HERE / "make_decoder.py").read_text()
    generator = random.Random(7)
    pieces = ["a", " ", "  ", "\n", "def ", "return", "é", "刄", "🦀", "12", "_", "(", "model", "▁", "\t", "."]
    drawn = ["".join(generator.choice(pieces) for _ in range(generator.randrange(1, 30))) for _ in range(60)]
    return TEXTS + [source[start : start + 200] for start in range(0, 4000, 400)] + drawn


def main():
    lines = [line for name in ("make_decoder.py", "formula_weights.py", "make_lm.py") for line in (HERE / name).read_text().splitlines()]
    for name, options in MODELS.items():
        (OUT / name).mkdir(parents=True, exist_ok=True)
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, num_threads=1, minloglevel=2, hard_vocab_limit=False, **options
        )
        path = OUT / name / "tokenizer.model"
        path.write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        cases = [{"text": text, "ids": processor.encode(text), "decoded": processor.decode(processor.encode(text))} for text in texts()]
        (OUT / name / "expected.json").write_text(json.dumps({"size": processor.vocab_size(), "cases": cases}))
        print(name, processor.vocab_size(), path.stat().st_size)


if __name__ == "__main__":
    main()
