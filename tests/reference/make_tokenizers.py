"""Tokenizer folders with added and special tokens, in the files of several years of transformers, and the ids they give.

    python tests/reference/make_tokenizers.py [OUT_FILE]        (default: tests/fixtures/models/tokenizers.json)

Each case is a few small files beside tiny_sd's vocabulary (`vocab.json` and `merges.txt`, or `tokenizer.json`).
"""
import json
import pathlib
import shutil
import sys
import tempfile

from tiny_sd import FIXTURES, TINY_SD, tokenizer
from transformers import CLIPTokenizer

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else FIXTURES / "models/tokenizers.json")
VOCABULARY = ["vocab.json", "merges.txt"]
FIRST = len(tokenizer())
PROMPTS = ["a photo of <cat-toy>", "a red <cat-toy>, zorb!", "A <Cat-Toy>on a <cat-toy2> !!", "skx dog, <|endoftext|> skxdog", "", "[PAD] !"]


def plain(text, **flags):
    return {"content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False} | flags


def special(text):
    return plain(text, normalized=False, special=True)


BOS, EOS = "<|startoftext|>", "<|endoftext|>"
SD1_CONFIG = {
    "add_prefix_space": False, "bos_token": {"__type": "AddedToken"} | plain(BOS), "do_lower_case": True,
    "eos_token": {"__type": "AddedToken"} | plain(EOS), "errors": "replace", "model_max_length": 77, "pad_token": EOS,
    "tokenizer_class": "CLIPTokenizer", "unk_token": {"__type": "AddedToken"} | plain(EOS)}
SD1_MAP = {"bos_token": plain(BOS), "eos_token": plain(EOS), "pad_token": EOS, "unk_token": plain(EOS)}
ADDED = {"<cat-toy>": FIRST, "<cat-toy2>": FIRST + 1, "skx": FIRST + 2}
DECODER = {
    str(tokenizer().bos_token_id): special(BOS), str(tokenizer().eos_token_id): special(EOS),
    str(FIRST): plain("<cat-toy>", rstrip=True) | {"special": False}, str(FIRST + 1): special("<cat-toy2>"),
    str(FIRST + 2): plain("skx", single_word=True, lstrip=True) | {"special": False}}

CASES = {
    "sd1": (VOCABULARY, {"tokenizer_config.json": SD1_CONFIG, "special_tokens_map.json": SD1_MAP}),
    "textual inversion": (VOCABULARY, {
        "tokenizer_config.json": SD1_CONFIG, "special_tokens_map.json": SD1_MAP, "added_tokens.json": ADDED}),
    "added, one of them special": (VOCABULARY, {
        "tokenizer_config.json": SD1_CONFIG, "added_tokens.json": ADDED,
        "special_tokens_map.json": SD1_MAP | {"additional_special_tokens": ["<cat-toy2>"]}}),
    "decoder": (VOCABULARY, {"tokenizer_config.json": SD1_CONFIG | {"added_tokens_decoder": DECODER}}),
    "decoder beside a map": (VOCABULARY, {
        "tokenizer_config.json": SD1_CONFIG | {"added_tokens_decoder": DECODER}, "added_tokens.json": {"ignored": 5},
        "special_tokens_map.json": SD1_MAP | {"pad_token": "!"}}),
    "sd2": (VOCABULARY, {"tokenizer_config.json": SD1_CONFIG, "special_tokens_map.json": SD1_MAP | {"pad_token": "!"}}),
    "a map beside tokenizer.json": (["tokenizer.json"], {
        "tokenizer_config.json": SD1_CONFIG, "special_tokens_map.json": SD1_MAP | {"pad_token": plain("!")}}),
    "a new token for padding": (VOCABULARY, {
        "tokenizer_config.json": SD1_CONFIG | {"pad_token": "[PAD]"}, "special_tokens_map.json": {"pad_token": "[PAD]"}}),
    "no files but the vocabulary": (VOCABULARY, {}),
}


def ids(vocabulary, files):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in vocabulary:
            shutil.copy(TINY_SD / "tokenizer" / name, folder / name)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        loaded = CLIPTokenizer.from_pretrained(folder)
        return loaded(PROMPTS, padding="max_length", max_length=77, truncation=True).input_ids


def main():
    cases = [
        {"name": name, "vocabulary": vocabulary, "files": files, "prompts": PROMPTS, "ids": ids(vocabulary, files)}
        for name, (vocabulary, files) in CASES.items()]
    for case in cases:
        print(case["name"], [[i for i in row if i != row[-1]] + [row[-1]] for row in case["ids"]][:4])
    OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
