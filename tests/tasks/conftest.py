"""A small byte-level tokenizer with chat template, trained on the families' own texts. Offline and quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvnotes_interp import tasks

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def build_tokenizer(texts: list[str], *, bos: bool = True, chat: bool = True, vocab: int = 3500) -> Any:
    """Byte-level BPE; `bos` adds <s> in front of plain text as Llama's tokenizer does."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|turn|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    out = []
    for name in tasks.families():
        for pair in tasks.load(name, n=64):
            out += [pair.text_old + pair.answer_old, pair.text_new + pair.answer_new]
    return out


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Any:
    return build_tokenizer(texts)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return build_tokenizer


@pytest.fixture
def family_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a small valid family file with changes; a value of None removes the key."""

    def write(name: str = "mine.yaml", **changes: Any) -> Path:
        import json

        import yaml

        spec: dict[str, Any] = {
            "kind": "derived",
            "about": "A test.",
            "source": "none",
            "content": "field",
            "prompt": [
                {"context": "The {thing} is {field}. "},
                {"rule": "Red means stop, green means go. "},
                {"decision": "So we"},
            ],
            "values": {" stop": ["red", "crimson"], " go": ["green", "lime"]},
            "slots": {"thing": ["light", "lamp", "flag"]},
        }
        spec.update(changes)
        spec = {key: value for key, value in spec.items() if value is not None}
        path = tmp_path / name
        path.write_text(json.dumps(spec) if path.suffix == ".json" else yaml.safe_dump(spec, sort_keys=False))
        return path

    return write
