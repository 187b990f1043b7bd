"""Figures of a result: `draw(result)`, `draw(result, "map")`; `available(result)` names what can be drawn.

One file per kind. The plotted numbers travel inside each figure (`fig.layout.meta["table"]`); `export.write` puts
them beside it as CSV.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError, nearest

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result

# kind -> (module, the view it needs, the readout of that view, what it shows); the most telling first.
KINDS: dict[str, tuple[str, str, str, str]] = {
    "frontier": ("frontier", "edit", "correct", "what each edit of the cache costs, and how often it is right"),
    "concentration": ("concentration", "cumulative", "recovery", "recovery against the number of top-ranked positions"),
    "map": ("layer_map", "layer_position", "recovery", "layer x position heat map with the tokens"),
    "states": ("states", "state", "recovery", "the cache states with intervals"),
    "strip": ("strip", "position", "recovery", "one prompt, each token coloured by its recovery"),
    "regions": ("regions", "region", "recovery", "share of the effect against share of the positions"),
    "layers": ("layers", "layer", "recovery", "recovery of a single layer"),
    "windows": ("windows", "window", "recovery", "recovery of nested windows"),
}


def available(result: Result) -> tuple[str, ...]:
    """Kinds that this result holds the rows for."""
    from kvnotes_interp.plots.data import has

    return tuple(kind for kind, (_, view, readout, _) in KINDS.items() if has(result, view, readout=readout))


def draw(result: Result, kind: str | None = None, **options: Any) -> Figure:
    """Draw one figure; without `kind` the most telling of those available.

    Raises InputError for an unknown kind or option, or one that this result has no rows for.
    """
    kinds = available(result)
    if kind is None:
        if not kinds:
            raise InputError("this result has nothing to draw: no competent pair has a recovery in any view.")
        kind = kinds[0]
    if kind not in KINDS:
        raise InputError(
            f"there is no plot {kind!r}.{nearest(str(kind), KINDS)} This result can draw: {', '.join(kinds) or 'none'}."
        )
    module, view, readout, _ = KINDS[kind]
    if kind not in kinds:
        raise InputError(
            f"plot {kind!r} needs {readout} in the view {view!r}, which this result lacks. "
            f"It can draw: {', '.join(kinds) or 'nothing'}."
        )
    function = importlib.import_module(f"{__name__}.{module}").draw
    known = set(function.__kwdefaults__ or {})
    for option in options:
        if option not in known:
            raise InputError(
                f"plot {kind!r} has no option {option!r}.{nearest(option, known)} It takes: {', '.join(sorted(known))}."
            )
    return function(result, **options)
