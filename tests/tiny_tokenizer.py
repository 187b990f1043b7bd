"""A small fast tokenizer, trained on the spot: byte-level BPE with a ChatML template. Offline, a few milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Ids 0, 1 and 2 are the pad, bos and eos of the configs in tests/architectures.py.
SPECIALS = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARAGRAPH = """
John went to the market to buy bread. The place was crowded and the line was slow. On the way home, he was happy.
Mary went to the market to buy milk. The place was quiet and the line was short. On the way home, she was happy.
Anna lives in Paris and works in France. Paul lives in Rome and works in Italy. Where does Anna live? In Paris.
The light is red, so we stop. The light is green, so we go. The order was sent, and the refund was paid.
Is the refund allowed? Yes. Is the order late? No. You are a helpful assistant. Answer with one word: yes or no.
The user asked a question, and the system gave the answer. The status of the account is active. It was not closed.
"""


def train(texts: Iterable[str], *, vocab: int = 512, bos: bool = False) -> PreTrainedTokenizerFast:
    """Train on `texts`. `bos` puts <|startoftext|> in front of plain text, as Llama's tokenizer does."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[1]} $A", special_tokens=[(SPECIALS[1], 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        additional_special_tokens=list(SPECIALS[3:]),
        chat_template=CHATML,
    )


@lru_cache(maxsize=8)
def tiny_tokenizer(vocab: int = 512, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of PARAGRAPH, at most `vocab` tokens. Match a model: `build(name, vocab=len(tokenizer))`."""
    return train([PARAGRAPH], vocab=vocab, bos=bos)
