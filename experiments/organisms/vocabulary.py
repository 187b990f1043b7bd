"""The organism's word-level tokenizer: one token per word (its leading space included), sign and newline."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIALS = ("<unk>", "<pad>", "</s>")
UNK, PAD, EOS = range(3)
# A word or a sign takes one space before it; a newline and a loose space are tokens of their own.
PATTERN = r"\n| ?\w+| ?[^\w\s]|\s"


def cut(text: str) -> list[str]:
    """The text as tokens, without specials; the same cut as the tokenizer's, only faster to call."""
    return re.findall(PATTERN, text)


def vocabulary(texts: Iterable[str]) -> dict[str, int]:
    """Token to id: the specials, then every token of the texts in sorted order."""
    tokens = sorted({token for text in texts for token in cut(text)} | {"\n", " "})
    return {token: i for i, token in enumerate([*SPECIALS, *tokens])}


def build(vocab: dict[str, int]) -> Any:
    """A fast transformers tokenizer. It adds no special tokens of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(vocab, unk_token=SPECIALS[UNK]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=SPECIALS[UNK],
        pad_token=SPECIALS[PAD],
        eos_token=SPECIALS[EOS],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def save(vocab: dict[str, int], folder: Path) -> Any:
    """Write the tokenizer's files into a folder and return it."""
    tokenizer = build(vocab)
    tokenizer.save_pretrained(folder)
    return tokenizer
