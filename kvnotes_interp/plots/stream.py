"""The memory of an iterated stream: bytes behind every chunk, against those of a cache of all tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plotly import graph_objects as go

from kvnotes_interp.plots import style

_LINES = (  # column, name, colour, dash
    ("whole_bytes", "all tokens kept", style.GREY, "dot"),
    ("peak_bytes", "before compaction", style.ORANGE, "dash"),
    ("bytes", "kept", style.BLUE, "solid"),
)


def draw(rows: Sequence[Mapping[str, Any]], *, title: str, subtitle: str = "") -> go.Figure:
    """Draw the rows of `probes.compaction.streaming.stream_rows`."""
    fig = style.figure(title, subtitle, height=420, margin={"b": 110})
    tokens = [row["tokens"] for row in rows]
    for column, name, colour, dash in _LINES:
        fig.add_trace(
            go.Scatter(
                x=tokens,
                y=[row[column] / 2**20 for row in rows],
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2, "dash": dash},
                marker={"size": 5, "color": colour},
                hovertemplate=f"{name}<br>%{{x}} tokens: %{{y:.3g}} MiB<extra></extra>",
            )
        )
    fig.update_xaxes(title_text="Tokens of the stream")
    fig.update_yaxes(title_text="Cache (MiB)", type="log")
    fig.update_layout(
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.22, "yanchor": "top"},
        meta={"kind": "stream", "table": {name: [row[name] for row in rows] for name in rows[0]}},
    )
    return fig
