"""The one look of all figures: template, colour-blind safe colours, the recovery scale and the titles.

Sizes are chosen for print: a figure of COLUMN pixels set at a column of 8.4 cm shows its 14 px text at about 6.5 pt.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plotly import colors
from plotly import graph_objects as go

if TYPE_CHECKING:
    import pandas as pd

LOG_TICKS = [
    d * 10.0**p for p in range(-4, 5) for d in (1, 2, 5)
]  # in full: plotly puts bare digits between powers of ten
COLUMN, WIDE = 520, 1000  # pixels: one column, and the full width of a page
TITLE_TOP = 22  # pixels from the top to the middle of the title's first line
FONT = "Helvetica, Arial, Liberation Sans, sans-serif"
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"
INK, GREY, PALE = "#222222", "#6b6b6b", "#d9d9d9"

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"

REGION_COLOURS = {
    "before": "#bdbdbd",
    "preamble": "#bdbdbd",
    "field": INK,
    "rule": BLUE,
    "context": SKY,
    "filler": "#a8a8a8",
    "delimiter": ORANGE,
    "decision": GREEN,
    "template": PURPLE,
}

# ColorBrewer's RdBu: white at 0, reds for recovery, blues for the wrong direction. Safe for red-green blindness.
_WARM = ["#ffffff", "#fee8dc", "#fdcdb4", "#f4a582", "#e27b5e", "#cb4a42", "#ab1529", "#7a0520"]
_COLD = ["#ffffff", "#d9e9f2", "#a9cfe4", "#6aacd0", "#3784bb", "#1c5c9c", "#053061"]

RECOVERY = "Recovery (0 = stale, 1 = oracle)"


def template() -> go.layout.Template:
    """White ground, thin grey grid, ticks outside, no chart junk."""
    axis = {
        "showline": True,
        "linecolor": INK,
        "linewidth": 1,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": INK,
        "gridcolor": "#ececec",
        "zeroline": False,
        "title": {"standoff": 8, "font": {"size": 14}},
        "tickfont": {"size": 13},
        "automargin": True,
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 14, "color": INK},
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "colorway": [BLUE, ORANGE, GREEN, RED, PURPLE, SKY],
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"font": {"family": FONT, "size": 13}, "bgcolor": "white", "bordercolor": GREY},
            "legend": {"bgcolor": "rgba(255,255,255,0.8)", "font": {"size": 13}},
        }
    )


def figure(title: str, subtitle: str = "", *, width: int = COLUMN, height: int = 400, **layout: Any) -> go.Figure:
    """An empty figure with the template, a left-aligned title, a grey subtitle and room for both."""
    per_line = int(width / 6.6)
    head = textwrap.wrap(title, int(width / 8.2)) or [""]
    rest = textwrap.wrap(subtitle, per_line)
    text = "<br>".join(f"<b>{line}</b>" for line in head)
    for line in rest:
        text += f'<br><span style="font-size:12px;color:{GREY}">{line}</span>'
    # A line of the title is 1.3 times its font size high, the smaller lines of the subtitle too.
    top = TITLE_TOP - 8 + 21 * (len(head) + len(rest))
    margin = {"l": 64, "r": 20, "t": top + 8, "b": 56} | layout.pop("margin", {})
    margin["t"] += layout.pop("extra_top", 0)
    return go.Figure(
        layout=dict(
            template=template(),
            title={
                "text": text,
                "x": 0,
                "xref": "container",
                "xanchor": "left",
                "pad": {"l": 12},
                "y": 1 - TITLE_TOP / height,
                "yref": "container",
                "yanchor": "top",
                "font": {"size": 16},
            },
            width=width,
            height=height,
            margin=margin,
            **layout,
        )
    )


def fit_height(fig: go.Figure, inner: float) -> None:
    """Make the plot area `inner` pixels high; the title keeps its distance from the top."""
    height = int(inner + fig.layout.margin.t + fig.layout.margin.b)
    fig.update_layout(height=height, title_y=1 - TITLE_TOP / height)


def recovery_colour(value: float, reach: float = 1.0) -> str:
    """Colour of one recovery on the scale on which `reach` is the deepest red and -reach the deepest blue."""
    if value is None or math.isnan(value):
        return "#ffffff"
    stops = _WARM if value >= 0 else _COLD
    where = min(abs(value) / reach, 1.0) * (len(stops) - 1)
    index = min(int(where), len(stops) - 2)
    low, high = colors.hex_to_rgb(stops[index]), colors.hex_to_rgb(stops[index + 1])
    mixed = colors.find_intermediate_color(low, high, where - index)
    return "rgb({:.0f},{:.0f},{:.0f})".format(*mixed)


def recovery_scale(values: Sequence[float]) -> tuple[list[list[Any]], float, float]:
    """(colour scale, lowest, highest) for these values: white at 0, equal depth for equal size on both sides.

    The scale reaches 1 where some value comes near it, and is drawn out for small effects, which the colour bar shows.
    The side below zero is only as long as the data need, so that 0 to 1 fills the bar.
    """
    finite = [v for v in values if v is not None and math.isfinite(v)]
    reach = reach_of(finite)
    low = -min(reach, nice(max(0.2 * reach, -min(finite, default=0.0))))
    stops = [i / 40 for i in range(41)]
    return [[s, recovery_colour(low + s * (reach - low), reach)] for s in stops], low, reach


def reach_of(values: Sequence[float]) -> float:
    """Top of the scale: 1, or a round number just over the largest value when all stay below 0.5."""
    top = max((v for v in values if v is not None and math.isfinite(v)), default=1.0)
    return 1.0 if top > 0.5 else nice(max(top, 0.01))


def nice(value: float) -> float:
    """The next round number at or above `value`: 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10):
        if value <= step * power * 1.0001:
            return step * power
    return 10 * power


def colour_bar(title: str, **more: Any) -> dict[str, Any]:
    """A slim bar with its title along it."""
    return dict(
        title={"text": title, "side": "right", "font": {"size": 13}},
        thickness=12,
        outlinewidth=0.5,
        outlinecolor=GREY,
        ticks="outside",
        ticklen=3,
        tickfont={"size": 12},
        **more,
    )


def faded(colour: str, alpha: float) -> str:
    """`colour` as rgba."""
    red, green, blue = colors.hex_to_rgb(colour)
    return f"rgba({red},{green},{blue},{alpha})"


def band(
    fig: go.Figure,
    table: pd.DataFrame,
    *,
    x: str,
    name: str,
    colour: str,
    dash: str = "solid",
    symbol: str = "circle",
) -> None:
    """A line through `mean` with the interval `low` to `high` as a band; n and n_effective go to the hover."""
    bounds = table.dropna(subset=["low", "high"])
    if len(bounds):
        fig.add_trace(
            go.Scatter(
                x=[*bounds[x], *bounds[x][::-1]],
                y=[*bounds["high"], *bounds["low"][::-1]],
                fill="toself",
                fillcolor=faded(colour, 0.16),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=name,
            )
        )
    fig.add_trace(
        go.Scatter(
            x=list(table[x]),
            y=list(table["mean"]),
            name=name,
            legendgroup=name,
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": dash},
            marker={"size": 6, "symbol": symbol, "color": colour},
            customdata=table[["low", "high", "n", "n_effective"]].to_numpy(dtype=float),
            hovertemplate=(
                f"{name}<br>%{{x}}: %{{y:.3f}}<br>95%: %{{customdata[0]:.3f}} to %{{customdata[1]:.3f}}"
                "<br>n = %{customdata[2]} pairs, %{customdata[3]} contents<extra></extra>"
            ),
        )
    )


def reference_lines(fig: go.Figure, **more: Any) -> None:
    """Thin lines at recovery 0 and 1."""
    for value in (0, 1):
        fig.add_hline(y=value, line={"color": GREY, "width": 1, "dash": "dot"}, layer="below", **more)
