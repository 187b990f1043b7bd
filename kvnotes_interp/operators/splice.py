"""Splicing: compiled chunks put behind a prefix, keys turned once to their place, and the seams repaired.

    blocks = operators.cut_texts(model.tokenizer, prefix, documents, suffix).blocks
    made = splice(model, blocks, seam_repair=8)               # or operators.find("splice@8")(model, blocks)

    skill = operators.precompile_skill(model, text)          # skills.py: kept on disk with what it was made from
    spliced = operators.splice_skills(model, prefix, [skill], suffix)

Keys are turned in float32 from where they were compiled to where they stand, values stay as they are. A repaired token
is truly recomputed: its hidden states are run through all layers on the mixed cache. (Notes, arXiv 2606.17107, splice.)

In layers with a sliding window a chunk may be longer than the window: caches here hold every slot and the mask alone
applies the window, counted in slots, so what is read is what the model would read of the same keys.

What this does not prove: that an unrepaired token knows what stands before it. It does not; only its key was moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache, join
from kvnotes_interp.errors import InputError
from kvnotes_interp.files import check_text
from kvnotes_interp.operators.blocks import Blocks, cut_texts
from kvnotes_interp.operators.made import Compiled, Made
from kvnotes_interp.operators.seams import repaired, stale

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.operators.skills import Skill

SeamRepair = int | Literal["all"]


def splice(model: Model, blocks: Blocks, *, seam_repair: SeamRepair = 0, compiled: Compiled | None = None) -> Made:
    """Join the compiled chunks behind the prefix and recompute the first `seam_repair` tokens of each.

    Args:
        seam_repair: tokens per chunk; 0 is `no_recompute`, "all" gives full recompute of the chunks. A chunk at slot 0
            has no seam.
        compiled: caches made beforehand by `operators.precompile`; None makes them here and counts them as compiled.

    Raises InputError for a `seam_repair` that is neither a number of tokens nor "all".
    """
    slots = [slot for chunk in stale(blocks) for slot in chunk[: repair_of(seam_repair, len(chunk))]]
    return repaired(model, blocks, slots, compiled)


def attach(model: Model, cache: KVCache, chunk: KVCache, *, seam_repair: SeamRepair = 0) -> Made:
    """One compiled chunk behind any cache; chunk after chunk, this is `splice`.

    Args:
        chunk: compiled alone, at positions 0, 1, ... Its keys are turned from there to behind `cache.end`.
        seam_repair: as in `splice`.

    The returned cost is that of the repair. Raises InputError when the two caches are not the same model's.
    """
    count = repair_of(seam_repair, len(chunk)) if len(cache) else 0
    if count and bool((chunk.token_ids < 0).any()):
        raise InputError("this chunk was compiled with a packet's wrappers: its seam cannot be repaired, only joined.")
    joined = join(cache, chunk.placed(torch.arange(cache.end, cache.end + len(chunk))))
    done = engine.recompute(model, joined, range(len(cache), len(cache) + count))
    return Made(done.cache, len(done.slots), done.layer_tokens)


def repair_of(seam_repair: SeamRepair, n: int) -> int:
    """How many of a chunk's `n` tokens are repaired."""
    if seam_repair == "all":
        return n
    if isinstance(seam_repair, bool) or not isinstance(seam_repair, int) or seam_repair < 0:
        raise InputError(f'seam_repair={seam_repair!r}: give a number of tokens from 0, or "all".')
    return min(seam_repair, n)


@dataclass(frozen=True)
class Spliced:
    """Skills behind a prefix.

    Attributes:
        blocks: token ids of prefix, skills and suffix as they are run.
        made: cache of prefix and skills; the prefix, run now, is in its cost.
        differences: one line per piece whose tokens would be others in the joint text; empty when all agree.
    """

    blocks: Blocks
    made: Made
    differences: tuple[str, ...] = ()


def splice_skills(
    model: Model,
    prefix: str,
    skills: Sequence[Skill],
    suffix: str,
    *,
    seam_repair: SeamRepair = 0,
    boundary: Literal["refuse", "show"] = "refuse",
    add_special_tokens: bool = True,
) -> Spliced:
    """Splice skills from a store: prefill the prefix, put the skills behind it, run nothing of them but the seams.

    Args:
        prefix: text before the skills; may be empty. suffix: text behind them, whose tokens the caller runs.
        boundary: what to do when the joint text has other tokens than its pieces: "refuse", or go on with the pieces'
            own tokens and "show" the difference.
        add_special_tokens: let the tokenizer put its BOS token before the prefix. Off for rendered chats.

    Raises:
        InputError: no skill, a skill of another tokenizer, model, revision or precision, or pieces that do not agree.
    """
    if boundary not in ("refuse", "show"):
        raise InputError(f'boundary={boundary!r}: choose "refuse" or "show".')
    for skill in skills:
        skill.check(model)
    tokenizer = model.tokenizer

    def ids(text: str, special: bool = False) -> tuple[int, ...]:
        check_text(text, "the prompt")
        return tuple(int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"])

    blocks = Blocks(ids(prefix, add_special_tokens), tuple(skill.token_ids for skill in skills), ids(suffix))
    texts = [skill.text for skill in skills]
    differences: tuple[str, ...] = ()
    if ids("".join((prefix, *texts, suffix)), add_special_tokens) != blocks.token_ids:
        differences = _differences(model, prefix, texts, suffix, blocks, add_special_tokens)
        if boundary == "refuse":
            raise InputError(
                "the joint text has other tokens than its pieces:\n  "
                + "\n  ".join(differences)
                + '\nEnd each piece with a newline and begin the next with a letter, or pass boundary="show".'
            )
    start = engine.prefill(model, blocks.prefix) if blocks.prefix else None
    made = splice(model, blocks, seam_repair=seam_repair, compiled=Compiled(start, tuple(s.cache for s in skills)))
    n = len(blocks.prefix)
    made = replace(
        made, recomputed_tokens=made.recomputed_tokens + n, layer_tokens=made.layer_tokens + n * made.cache.n_layers
    )
    return Spliced(blocks, made, differences)


def _differences(
    model: Model, prefix: str, texts: Sequence[str], suffix: str, blocks: Blocks, special: bool
) -> tuple[str, ...]:
    """Per piece whose tokens differ: its end in the joint text, beside what it is alone."""
    cut = cut_texts(model.tokenizer, prefix, texts, suffix, straddle="show", add_special_tokens=special).blocks
    names = ("prefix", *(f"skill {i}" for i in range(len(texts))), "suffix")
    together = (cut.prefix, *cut.chunks, cut.suffix)
    apart = (blocks.prefix, *blocks.chunks, blocks.suffix)

    def show(piece: Sequence[int]) -> str:
        read = [model.tokenizer.decode([i]) for i in piece]
        return repr(read if len(read) <= 6 else [*read[:3], "...", *read[-3:]])

    return tuple(
        f"{name}: together {show(a)}, alone {show(b)}"
        for name, a, b in zip(names, together, apart, strict=True)
        if a != b
    )
