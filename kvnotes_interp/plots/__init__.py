"""Figures of a result: `draw(result)`, `draw(result, "map")`; `available(result)` names what can be drawn.

One file per kind. The plotted numbers travel inside each figure (`fig.layout.meta["table"]`); `export.write` puts
them beside it as CSV.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from kvnotes_interp.errors import InputError, nearest

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result


class Kind(NamedTuple):
    """A kind of figure: the file that draws it, the rows it needs, and what it shows."""

    module: str
    view: str
    readout: str
    about: str
    part: str | None = "kv"  # None: any


# The most telling first.
KINDS: dict[str, Kind] = {
    "frontier": Kind("frontier", "edit", "correct", "what each edit of the cache costs, and how often it is right"),
    "splice_share": Kind("splice_share", "quality", "exact_match", "answers of composed caches by share run", None),
    "splice_documents": Kind("splice_documents", "quality", "exact_match", "the same by number of documents", None),
    "splice_ttft": Kind("splice_ttft", "ttft", "speedup", "time to the first token against length", None),
    "compaction_passes": Kind("compaction_passes", "cost", "peak", "answers of compact caches by number of passes"),
    "compaction_ratio": Kind("compaction_ratio", "compaction", "exact_match", "answers of compact caches by ratio"),
    "compaction_time": Kind("compaction_time", "time", "prefills", "the same against the time to compact", None),
    "survival": Kind("survival", "survival", "gap", "derived against verbatim decisions, by compactor and ratio"),
    "decodability": Kind("decodability", "decodability", "accuracy", "accuracy of linear probes, by layer", None),
    "staleness": Kind("staleness", "staleness", "reads_new", "which conclusion a probe reads on each cache", None),
    "direction": Kind("direction", "direction", "recovery", "pushing along the probe's direction", None),
    "read_heads": Kind("read_heads", "read_head", "dla_share", "layer x head: who writes the answer at the end", None),
    "head_curve": Kind("head_curve", "read_curve", "recovery", "recovery by the number of heads patched", None),
    "knockout": Kind("knockout", "knockout", "recovery", "recovery by the share of positions cut off", None),
    "edges": Kind("edges", "edge", "recovery", "decision cut off from field, downstream or sink", None),
    "edge_heads": Kind("edge_heads", "edge_head", "recovery", "single heads cut off from the field or the notes", None),
    "write_heads": Kind("write_heads", "write_head", "change", "layer x head: who changes at the aggregators", None),
    "scrub": Kind("scrub", "scrub", "recovery", "notes and the rest exchanged between prompts", None),
    "dose": Kind("dose", "dose", "flip", "decisions that follow a false note, by its size", None),
    "deviation": Kind("deviation", "deviation", "deviation", "layer x relative position of reused blocks, by operator"),
    "deviation_curve": Kind("deviation_curve", "deviation", "deviation", "the same by relative position and region"),
    "sink": Kind("sink", "sink", "first_token", "attention drawn by the first token of a block"),
    "kv_angles": Kind("kv_angles", "kv", "angle", "keys and values against full recompute, by layer", None),
    "concentration": Kind("concentration", "cumulative", "recovery", "recovery against the number of top positions"),
    "map": Kind("layer_map", "layer_position", "recovery", "layer x position heat map with the tokens"),
    "states": Kind("states", "state", "recovery", "the cache states with intervals"),
    "strip": Kind("strip", "position", "recovery", "one prompt, each token coloured by its recovery"),
    "regions": Kind("regions", "region", "recovery", "share of the effect against share of the positions"),
    "layers": Kind("layers", "layer", "recovery", "recovery of a single layer"),
    "windows": Kind("windows", "window", "recovery", "recovery of nested windows"),
}


def available(result: Result) -> tuple[str, ...]:
    """Kinds that this result holds the rows for."""
    from kvnotes_interp.plots.data import has

    return tuple(name for name, k in KINDS.items() if has(result, k.view, part=k.part, readout=k.readout))


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
    chosen = KINDS[kind]
    if kind not in kinds:
        raise InputError(
            f"plot {kind!r} needs {chosen.readout} in the view {chosen.view!r}, which this result lacks. "
            f"It can draw: {', '.join(kinds) or 'nothing'}."
        )
    function = importlib.import_module(f"{__name__}.{chosen.module}").draw
    known = set(function.__kwdefaults__ or {})
    for option in options:
        if option not in known:
            raise InputError(
                f"plot {kind!r} has no option {option!r}.{nearest(option, known)} It takes: {', '.join(sorted(known))}."
            )
    return function(result, **options)
