"""Gaps in texts as transformers' CodeLlamaTokenizer marks them -> tests/fixtures/fim.json.

A tiny tokenizer with the tokens and the rules of Code Llama's. A suffix follows its mark as it is, as in transformers 4 and in the
original code (`encode_infilling` of codellama/llama/tokenizer.py): transformers 5.23 puts a space before it, which its own description
of the form (`<PRE> {pre} <SUF>{suf} <MID>`) does not have. So the rule that adds the space is left out while a gap is converted.
"""

import json
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import CodeLlamaTokenizer

OUT = Path(__file__).resolve().parent.parent / "fixtures" / "fim.json"
MERGES = ["▁ a", "▁ b", "▁ d", "e f", "▁d ef", "▁ ▁", "f o", "fo x", "▁▁ ▁▁", "b a"]
WORDS = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", *"abdefoxn()=:+0123", "ä"]
CASES = [
    ("def a", "b"), (" def a", " b"), ("", "b"), ("a", "ba d"), ("a\n", "\nb"), ("  fox", "fox  \n"), ("a ", "    b"), ("ä", "ä"), ("", ""),
    ("a", ""),
]


def main():
    names = list(dict.fromkeys(WORDS + [merge.replace(" ", "") for merge in MERGES] + ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]))
    vocab = {name: index for index, name in enumerate(names)}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = CodeLlamaTokenizer(vocab=vocab, merges=merges, fill_token=None)
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    spaced = tokenizer._tokenizer.pre_tokenizer
    cases = []
    for prefix, suffix in CASES:
        tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        # With an empty suffix transformers takes the text as one without a gap.
        ids = tokenizer(prefix, suffix=suffix or "b")["input_ids"]
        tokenizer._tokenizer.pre_tokenizer = spaced
        if not suffix:
            ids.remove(vocab["b"])
        cases.append({"prefix": prefix, "suffix": suffix, "ids": ids})
    marks = [vocab[name] for name in ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")]
    text = json.dumps({"tokenizer": saved, "marks": marks, "cases": cases}, separators=(",", ":"))
    OUT.write_text(text + "\n")
    print(f"{OUT}: {len(text)} bytes")


if __name__ == "__main__":
    main()
