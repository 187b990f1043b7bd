"""Where the notes are in caches that operators made: local patching of the same pairs, one run per operator.

Left, the field's own document: what a single token behind the field recovers, against its place in the document. Right:
what each region recovers when it is patched alone. Pairs must lie in documents (families `biography_pairs`,
`gate_documents`); run with `tail="suffix"`, so that everything shown is in what the operator made.
(The question of SemPIC, arXiv 2607.28069, boundary against interior, put to the notes of arXiv 2606.17107.)

What this does not show: a note that is spread over many tokens, each of which recovers little alone; compare the curve
with the bar of its region.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd
from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import splicing, style
from kvnotes_interp.plots.data import about, intervals, remember, rows_of

if TYPE_CHECKING:
    from kvnotes_interp.results import Result

REGIONS = {
    "field": "field",
    "rule": "rule",
    "delimiter": "delimiters of<br>its document",
    "context": "rest of<br>its document",
    "filler": "other<br>documents",
    "wrapper": "wrappers",
    "decision": "decision",
}
STATES = ("field_only", "downstream_only")
_LEFT, _RIGHT = (0.0, 0.5), (0.57, 1.0)  # of the width


def compare(results: Mapping[str, Result], *, bins: int = 20) -> pd.DataFrame:
    """What the figure shows, as a table: one row per operator and site.

    Args:
        results: operator -> its run of `local_patching`, all on the same pairs, with the views position and region.
        bins: stretches of relative position in the field's document.

    Columns: operator, view ("state", "region", "relative"), site (state, region, or ""), relative (middle of the bin),
    mean recovery with its interval low to high, n (pairs), n_effective (contents). Only pairs that are competent under
    every operator count. A relative position is that of the token's middle among the document's tokens (wrappers aside,
    0 to 1); bins average the tokens behind the field, the field itself is the region's bar.

    Raises InputError when no pair is competent under all, or the pairs do not lie in documents.
    """
    if bins < 1:
        raise InputError(f"bins={bins}: at least one stretch is needed.")
    common = _common(results)
    out = []
    for operator, result in results.items():
        for view, sites in (("state", STATES), ("region", tuple(REGIONS))):
            rows = rows_of(result, view)
            rows = rows[rows["pair"].isin(common) & rows["site"].isin(sites)]
            out.append(intervals(result, rows, ["site"]).assign(operator=operator, view=view))
        rows = rows_of(result, "position")
        placed = _placed(result, rows[rows["pair"].isin(common)], bins)
        out.append(intervals(result, placed, ["relative"]).assign(operator=operator, view="relative", site=""))
    columns = ["operator", "view", "site", "relative", "mean", "low", "high", "n", "n_effective"]
    return pd.concat(out, ignore_index=True)[columns]


def draw(results: Mapping[str, Result], *, bins: int = 20) -> go.Figure:
    """The two panels; see `compare` for the arguments and for what raises."""
    table = compare(results, bins=bins)
    common = _common(results)
    some = next(iter(results.values()))
    rows = rows_of(some, "state")
    own = ", ".join(f"{_name(name, i)} {_competent(result)}" for i, (name, result) in enumerate(results.items()))
    fig = style.figure(
        "Where the notes are, by operator",
        about(
            some,
            rows[rows["pair"].isin(common)],
            interval="Bands and bars",
            more=f"Pairs competent under all; under each: {own}.",
        ),
        width=style.WIDE,
        height=480,
        margin={"b": 150},
    )
    for index, operator in enumerate(results):
        name, colour, dash, symbol = splicing.look(operator, index)
        mine = table[table["operator"] == operator]
        curve = mine[mine["view"] == "relative"]
        style.band(fig, curve, x="relative", name=name, colour=colour, dash=dash, symbol=symbol)
        _bars(fig, mine[mine["view"] == "region"], name, colour)
    present = [region for region in REGIONS if region in set(table.loc[table["view"] == "region", "site"])]
    fig.update_layout(
        xaxis={"domain": _LEFT, "range": [0, 1], "title": {"text": "Relative position in the field's document"}},
        yaxis={"title": {"text": style.RECOVERY}},
        xaxis2={
            "domain": _RIGHT,
            "anchor": "y2",
            "categoryorder": "array",
            "categoryarray": [REGIONS[region] for region in present],
        },
        yaxis2={"anchor": "x2", "matches": "y", "title": {"text": "Region patched alone"}},
        barmode="group",
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.32, "yanchor": "top"},
    )
    return remember(fig, "notes_by_operator", some, table)


def _bars(fig: go.Figure, rows: pd.DataFrame, name: str, colour: str) -> None:
    fig.add_trace(
        go.Bar(
            x=[REGIONS[str(site)] for site in rows["site"]],
            y=list(rows["mean"]),
            name=name,
            legendgroup=name,
            showlegend=False,
            marker={"color": colour, "line": {"width": 0}},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": list((rows["high"] - rows["mean"]).fillna(0)),
                "arrayminus": list((rows["mean"] - rows["low"]).fillna(0)),
                "color": style.INK,
                "thickness": 1.3,
                "width": 3,
            },
            customdata=rows[["n", "n_effective"]].to_numpy(dtype=float),
            hovertemplate=f"{name}, %{{x}}: %{{y:.3f}}<br>n = %{{customdata[0]}} pairs, %{{customdata[1]}} contents"
            "<extra></extra>",
            xaxis="x2",
            yaxis="y2",
        )
    )


def _placed(result: Result, rows: pd.DataFrame, bins: int) -> pd.DataFrame:
    """Rows of single tokens behind the field in the field's document, with `relative`, the middle of their bin."""
    if "documents" not in result.pairs:
        raise InputError("these pairs do not lie in documents; take biography_pairs or gate_documents.")
    where: dict[tuple[str, int], float] = {}
    for pair in result.pairs[result.pairs["pair"].isin(set(rows["pair"]))].to_dict("records"):
        home = pair["documents"][pair["field_start"]]
        slots = [slot for slot, document in enumerate(pair["documents"]) if document == home]
        for rank, slot in enumerate(slots):
            if slot >= pair["field_stop"]:
                middle = (rank + 0.5) / len(slots)
                where[pair["pair"], slot] = (int(middle * bins) + 0.5) / bins
    places = [where.get((str(pair), int(slot))) for pair, slot in zip(rows["pair"], rows["position"], strict=True)]
    return rows.assign(relative=pd.Series(places, rows.index, dtype=float)).dropna(subset=["relative"])


def _common(results: Mapping[str, Result]) -> set[str]:
    """Pairs that are competent under every operator."""
    if not results:
        raise InputError("no runs were given; pass operator -> result of local_patching.")
    kept = [set(result.pairs.loc[result.pairs["competent"].astype(bool), "pair"]) for result in results.values()]
    common = set.intersection(*kept)
    if not common:
        counts = ", ".join(f"{name} {len(pairs)}" for name, pairs in zip(results, kept, strict=True))
        raise InputError(f"no pair is competent under every operator (competent pairs: {counts}); nothing to compare.")
    return common


def _competent(result: Result) -> str:
    return f"{int(result.pairs['competent'].astype(bool).sum())} of {len(result.pairs)}"


def _name(operator: str, index: int) -> str:
    return splicing.look(operator, index)[0]
