"""An erratum: the cache stays as it is, and a sentence that corrects the field is run before the decision text.

The decision text is run anew with the erratum in view, and counted. (Notes, arXiv 2606.17107, editing: wordings,
field + erratum, and controls.)
"""

from __future__ import annotations

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.operators.blocks import cut_pair
from kvnotes_interp.operators.edits import states
from kvnotes_interp.operators.edits.setting import Setting
from kvnotes_interp.operators.made import Made

TEMPLATES = {
    "bare": "{value}.",
    "tagged": "[UPDATE] {label}: {value}.",
    "override": "[STATE UPDATE] {label} has just changed to {value}; this overrides any earlier value. "
    "Apply the current value.",
    "aggressive": "[STATE UPDATE] {label} has just changed to {value}; disregard your earlier conclusion and "
    "re-evaluate.",
}
RESTATE = "restate"  # the field's own sentence once more, with the new value
WORDINGS = (*TEMPLATES, RESTATE)
_ELSEWHERE = ("the weather", "sunny")  # label and value of a field that no family has
_NOTHING = "[STATE UPDATE] Nothing has changed."


def erratum(setting: Setting, *, wording: str = "override") -> Made:
    """The stale cache, an erratum with the new value, then the decision text.

    Args:
        wording: one of WORDINGS, or a text with {label} and {value}.
    """
    return _appended(setting, setting.stale, text_ids(setting, wording, setting.pair.pair.field_new))


def field_erratum(setting: Setting, *, wording: str = "override") -> Made:
    """`field_only` first, then the erratum: both run on the edited cache, not on a prefill of the new text."""
    edited = states.field_only(setting)
    said = _appended(setting, edited.cache, text_ids(setting, wording, setting.pair.pair.field_new))
    return Made(
        said.cache,
        edited.recomputed_tokens + said.recomputed_tokens,
        edited.layer_tokens + said.layer_tokens,
    )


def wrong_value(setting: Setting, *, wording: str = "override") -> Made:
    """Control: an erratum that states the old value. The decision must stay the old one."""
    return _appended(setting, setting.stale, text_ids(setting, wording, setting.pair.pair.field_old))


def irrelevant_field(setting: Setting, *, wording: str = "override") -> Made:
    """Control: an erratum about a field that the prompt does not have. The decision must stay the old one."""
    label, value = _ELSEWHERE
    return _appended(setting, setting.stale, text_ids(setting, wording, value, label=label))


def no_op(setting: Setting) -> Made:
    """Control: an erratum that says that nothing has changed. The decision must stay the old one."""
    return _appended(setting, setting.stale, _encoded(setting, _NOTHING))


def text_ids(setting: Setting, wording: str, value: str, *, label: str | None = None) -> list[int]:
    """Token ids of an erratum that states `value`, as they stand before the decision text.

    Raises InputError for a wording that is none of WORDINGS and has no {value}.
    """
    pair = setting.pair
    if wording == RESTATE:
        side = "new" if value == pair.pair.field_new else "old"
        blocks = cut_pair(pair, side=side)
        return [t for (a, b), c in zip(blocks.spans, blocks.chunks, strict=True) if a <= pair.field[0] < b for t in c]
    text = TEMPLATES.get(wording, wording)
    if "{value}" not in text:
        raise InputError(
            f"wording={wording!r}: choose from {', '.join(WORDINGS)}, or give a text with {{value}}."
            + nearest(wording, WORDINGS)
        )
    return _encoded(setting, text.format(label=label or pair.pair.label, value=value.strip()))


def _encoded(setting: Setting, text: str) -> list[int]:
    """The text as tokens that follow what stands before the decision text: on a line of its own, or after a space."""
    before = setting.pair.tokens_old[setting.decision_start - 1]
    after = setting.pair.tokens_old[setting.decision_start]
    lead = "" if before.endswith(("\n", " ")) else "\n" if after.startswith("\n") else " "
    trail = "\n" if before.endswith("\n") or after.startswith("\n") else "" if after.startswith(" ") else " "
    return [int(i) for i in setting.model.tokenizer(lead + text + trail, add_special_tokens=False)["input_ids"]]


def _appended(setting: Setting, cache: KVCache, ids: list[int]) -> Made:
    start = setting.decision_start
    run = [*ids, *setting.pair.old_ids[start : setting.stop]]
    grown, _ = engine.extend(setting.model, cache[:start], run)
    return Made(grown, len(run), len(run) * grown.n_layers)
