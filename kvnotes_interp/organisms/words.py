"""A word-level tokenizer over the words of some texts: what an organism reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
_WORD = r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]|\s"


def word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words of `texts`, each with the blank before it.

    Words are cut by a regular expression alone, so that cutting a text at a word's beginning and reading both parts
    gives the tokens of the whole.
    """
    import re

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = dict.fromkeys(SPECIALS)
    for text in texts:
        words.update(dict.fromkeys(re.findall(_WORD, text)))
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIALS[3]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="isolated")
    core.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIALS
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk)
