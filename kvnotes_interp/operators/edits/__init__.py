"""Edits: ways to make the cache of a prompt say a new value of its field, each with an exact account of its cost.

    setting = edits.open_setting(model, encoded_pair)
    made = edits.find("erratum")(setting, wording="tagged")

An edit is a pure function `(setting, *, options) -> Made` in a small file; add it to `EDITS`. Its cache holds all that
stands before the decision token, which is then run on top; tokens and layer-tokens count what was run for it besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.operators.edits import erratum as _errata
from kvnotes_interp.operators.edits import selective, states
from kvnotes_interp.operators.edits.rankings import NEW_RUN, OLD_RUN, RANKINGS, profiled_on, rank
from kvnotes_interp.operators.edits.setting import Setting, open_setting
from kvnotes_interp.operators.made import Made

__all__ = [
    "EDITS",
    "NEW_RUN",
    "OLD_RUN",
    "RANKINGS",
    "Edit",
    "Setting",
    "find",
    "open_setting",
    "profiled_on",
    "rank",
]


@dataclass(frozen=True)
class Edit:
    """An edit by name. `control`: it must leave the old decision as it is. `takes_k`: it wants `k` and a ranking."""

    name: str
    function: Callable[..., Made]
    about: str
    control: bool = False
    takes_k: bool = False

    def __call__(self, setting: Setting, **options: object) -> Made:
        """Run it."""
        return self.function(setting, **options)


EDITS: dict[str, Edit] = {
    edit.name: edit
    for edit in (
        Edit("stale", states.stale, "the old cache as it is"),
        Edit("field_only", states.field_only, "the field recomputed in place"),
        Edit("full_downstream", states.full_downstream, "the field and everything after it recomputed"),
        Edit("oracle", states.oracle, "the new prompt prefilled from nothing"),
        Edit("hoist", states.hoist, "the field's sentence moved behind all others"),
        Edit("erratum", _errata.erratum, "a sentence that corrects the field, before the decision text"),
        Edit("field_erratum", _errata.field_erratum, "the field recomputed in place, then the erratum"),
        Edit("patch_top_k", selective.patch_top_k, "field and top k copied from the new run: a bound", takes_k=True),
        Edit("recompute_top_k", selective.recompute_top_k, "field and top k run on the mixed cache", takes_k=True),
        Edit("cacheblend", selective.cacheblend, "CacheBlend: the most changed in layer 1 go on"),
        Edit("erratum_wrong_value", _errata.wrong_value, "an erratum that states the old value", control=True),
        Edit("erratum_irrelevant", _errata.irrelevant_field, "an erratum about another field", control=True),
        Edit("erratum_no_op", _errata.no_op, "an erratum that says that nothing changed", control=True),
    )
}


def find(name: str) -> Edit:
    """The edit of this name. Raises InputError with the nearest right name."""
    if name not in EDITS:
        raise InputError(f"there is no edit {name!r}.{nearest(str(name), EDITS)} Edits: {', '.join(EDITS)}.")
    return EDITS[name]
