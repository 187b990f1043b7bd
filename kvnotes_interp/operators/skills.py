"""Skills: texts compiled once to caches that are kept on disk, with everything that decides whether they may be used.

    store = SkillStore("skills", model)
    skill = store.get(text)        # compiled the first time, read from disk afterwards
    store = SkillStore("skills", model, writer=Writer.load("runs/bio", model))       # compiled by a trained Writer

A skill is two files: the cache (safetensors) and, written last, a small JSON file with its text, the hash of text and
cache, the tokenizer's fingerprint, the model and its revision. A cache of another tokenizer, model, revision, rotary
geometry or precision is refused by name, never used. One that a Writer compiled says by which; any may be read by
the plain model, with `splice_skills` or joined by hand.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.downloads import sha256
from kvnotes_interp.errors import InputError
from kvnotes_interp.files import check_text, entry, read_json, replacing
from kvnotes_interp.fingerprint import tokenizer as tokenizer_fingerprint
from kvnotes_interp.operators.writer import Writer

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

FORMAT = "skill/1"


@dataclass(frozen=True)
class Skill:
    """A text compiled alone, at positions 0, 1, ..., without a BOS token.

    Attributes:
        cache: its keys and values; `cache.model_id` and `cache.rope` name the model.
        tokenizer: fingerprint of the tokenizer that cut the text.
        revision: commit or file hash of the weights, where known.
        writer: fingerprint of the Writer that compiled it; empty for the plain model.
    """

    text: str
    cache: KVCache
    tokenizer: str
    revision: str = ""
    writer: str = ""

    @property
    def text_sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the text: wrapper slots, which hold no token, are not among them."""
        return tuple(token for token in self.cache.token_ids[0].tolist() if token >= 0)

    def check(self, model: Model) -> None:
        """Raise InputError, naming what differs, unless this model may read the skill."""
        again = "Compile the text again with this model: operators.precompile_skill(model, text)."
        if not self.cache.rope.same_as(model.rope):
            raise InputError(
                "this skill's keys were turned by another rotary embedding (RoPE) than the model's; they cannot be "
                f"moved to their place. {again}"
            )
        have, want = self.tokenizer, tokenizer_fingerprint(model.tokenizer)
        if have != want:
            raise InputError(
                f"this skill was cut by tokenizer {have}, the model at hand has {want}: the same text would be other "
                f"tokens. {again}"
            )
        if self.cache.model_id != model.model_id:
            raise InputError(
                f"this skill was compiled by {self.cache.model_id!r}, the model at hand is {model.model_id!r}. {again}"
            )
        found = revision_of(model)
        if self.revision and found and self.revision != found:
            raise InputError(f"this skill was compiled by revision {self.revision}, the model is at {found}. {again}")
        if self.cache.dtype != model.dtype:
            raise InputError(f"this skill is {self.cache.dtype}, the model runs in {model.dtype}. {again}")

    def save(self, path: str | Path) -> Path:
        """Write `path` (a .safetensors file) and the JSON file beside it; returns `path`."""
        path = self.cache.save(path)
        about = {
            "format": FORMAT,
            "text": self.text,
            "text_sha256": self.text_sha256,
            "tokens": len(self.token_ids),
            "tokenizer": self.tokenizer,
            "model_id": self.cache.model_id,
            "revision": self.revision,
            "writer": self.writer,
            "cache_sha256": sha256(path),
        }
        with replacing(_beside(path)) as temporary:
            temporary.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path, model: Model) -> Skill:
        """Read a skill and check that this model may use it.

        Raises InputError when a file is missing or is not the one that was written, or as `check`.
        """
        path = Path(path)
        beside = _beside(path)
        if not beside.is_file():
            raise InputError(f"{beside} is missing: {path.name} was not written to its end. Compile the text again.")
        about = read_json(beside, "description of a skill", of=dict)
        if about.get("format") != FORMAT:
            raise InputError(f"{beside} describes no skill of format {FORMAT!r} (found {about.get('format')!r}).")
        for name in ("text", "text_sha256", "cache_sha256", "tokenizer", "revision"):
            entry(about, name, str, str(beside), "Compile the text again.")
        if not path.is_file() or sha256(path) != about["cache_sha256"]:
            raise InputError(f"{path} is not the cache that {beside.name} describes (sha256). Compile the text again.")
        cache, writer = KVCache.load(path, device=model.device), about.get("writer", "")
        skill = cls(about["text"], cache, about["tokenizer"], about["revision"], writer)
        if skill.text_sha256 != about["text_sha256"]:
            raise InputError(f"the text in {beside} was changed after it was compiled (sha256). Compile it again.")
        skill.check(model)
        return skill


def precompile_skill(model: Model, text: str, *, writer: Writer | None = None) -> Skill:
    """Compile `text` alone, without a BOS token, by the plain model or a Writer.

    Raises InputError for an empty text, a model without a tokenizer, or another model's Writer.
    """
    fingerprint = tokenizer_fingerprint(model.tokenizer)
    check_text(text, "the skill's text")
    ids = [int(i) for i in model.tokenizer(text, add_special_tokens=False)["input_ids"]]
    if not ids:
        raise InputError(f"the skill's text {text!r} has no tokens.")
    if writer is None:
        return Skill(text, engine.prefill(model, ids), fingerprint, revision_of(model))
    with torch.no_grad():
        cache = writer.compile(model, [ids])[0]
    return Skill(text, cache, fingerprint, revision_of(model), writer.fingerprint)


class SkillStore:
    """Skills of one model in a folder, each compiled when it is first asked for.

    Args:
        folder: made when needed; several models and Writers may share it, each finds only its own.
        writer: what compiles; None is the plain model. It may not be trained further while the store is in use.
    """

    def __init__(self, folder: str | Path, model: Model, *, writer: Writer | None = None) -> None:
        self.folder, self.model, self.writer = Path(folder), model, writer
        made_by = (tokenizer_fingerprint(model.tokenizer), model.model_id, revision_of(model), str(model.dtype))
        self._made_by = "|".join(made_by if writer is None else (*made_by, writer.fingerprint))

    def path(self, text: str) -> Path:
        """Where the skill of this text is kept: the name is a hash of the text and of all that decides its cache."""
        check_text(text, "the skill's text")
        name = hashlib.sha256(f"{self._made_by}|{text}".encode()).hexdigest()[:32]
        return self.folder / f"{name}.safetensors"

    def get(self, text: str) -> Skill:
        """The skill of this text, from disk if it is there whole. Raises InputError when its file was changed."""
        path = self.path(text)
        if _beside(path).is_file():
            return Skill.load(path, self.model)
        skill = precompile_skill(self.model, text, writer=self.writer)
        skill.save(path)
        return skill


def revision_of(model: Model) -> str:
    """The commit or the file hash of the model's weights, or an empty string where neither is known."""
    return model.source.revision or model.source.sha256


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")
