"""The picture of a run: hit share by counting and by the server, and time to first token, per arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.errors import InputError
from kvnotes_interp.plots import style

if TYPE_CHECKING:
    from experiments.serving.run import Row

NAMES = {
    "in_place": "in-place<br>change",
    "erratum": "erratum",
    "hoist": "hoisted<br>to the end",
    "stale": "nothing told<br>(control)",
}
SHARES = {
    "blocks": ("counted (blocks)", style.SKY),
    "slot": ("counted (slot)", style.BLUE),
    "server": ("server", style.ORANGE),
}
LINES = {"in_place": "in place", "erratum": "erratum", "hoist": "hoisted", "stale": "control"}
COLOURS = {"in_place": style.RED, "erratum": style.GREEN, "hoist": style.BLUE, "stale": style.GREY}


def draw(rows: Sequence[Row]) -> go.Figure:
    """Left: hit shares at the first rate. Right: TTFT over the rates, p50 full and p90 hollow, on a logarithmic scale.

    Raises:
        InputError: there are no rows.
    """
    if not rows:
        raise InputError("there is nothing to draw: the run has no rows.")
    rates = sorted({row.rate for row in rows})
    first = [row for row in rows if row.rate == rates[0]]
    done, failed = sum(row.done for row in rows), sum(row.failed for row in rows)
    fig = style.figure(
        "What each way of telling does to the prefix cache",
        f"{done} requests answered, {failed} not. Full marks: median; hollow marks: 90th percentile.",
        width=style.WIDE,
        height=430,
        barmode="group",
        extra_top=34,
    )
    arms = [row.arm for row in first]
    for key, (name, colour) in SHARES.items():
        values = [row.server if row.server is not None else row.counters for row in first]
        shares = values if key == "server" else [getattr(row, key) for row in first]
        if all(share is None for share in shares):
            continue
        fig.add_trace(
            go.Bar(
                x=[NAMES[arm] for arm in arms],
                y=[None if share is None else 100 * share for share in shares],
                name=name,
                marker={"color": colour},
                text=["" if share is None else f"{100 * share:.1f}" for share in shares],
                textposition="outside",
                textfont={"size": 10},
                cliponaxis=False,
                hovertemplate=f"%{{x}}, {name}: %{{y:.2f}} %<extra></extra>",
            )
        )
    labels = ["one by one" if rate == 0 else "all at once" if rate == float("inf") else f"{rate:g}/s" for rate in rates]
    for arm in arms:
        own = {row.rate: row for row in rows if row.arm == arm}
        for key, hollow in (("ttft_p50", False), ("ttft_p90", True)):
            times = [getattr(own[rate], key) if rate in own else None for rate in rates]
            fig.add_trace(
                go.Scatter(
                    x=labels,
                    y=times,
                    xaxis="x2",
                    yaxis="y2",
                    mode="lines+markers",
                    name=LINES[arm],
                    legend="legend2",
                    legendgroup=arm,
                    showlegend=not hollow,
                    line={"color": COLOURS[arm], "width": 1.5, "dash": "dot" if hollow else "solid"},
                    marker={"symbol": "circle-open" if hollow else "circle", "size": 9, "color": COLOURS[arm]},
                    hovertemplate=f"{arm}, {key[-3:]}, %{{x}}: %{{y:.3g}} s<extra></extra>",
                )
            )
    low = {"orientation": "h", "yanchor": "bottom", "y": 1.01, "xanchor": "left", "font": {"size": 12}}
    fig.update_layout(
        xaxis={"domain": [0, 0.46], "showgrid": False, "ticks": ""},
        yaxis={"title": "Prompt tokens from the cache (%)", "range": [0, 109]},
        xaxis2={"domain": [0.56, 1], "anchor": "y2", "title": "Rate of requests", "type": "category"},
        yaxis2={"anchor": "x2", "type": "log", "dtick": "D2", "title": "Time to first token (s)"},
        legend={**low, "x": 0},
        legend2={**low, "x": 0.56},
    )
    return fig
