"""The figure of a training run: loss and validation KL above, answers below, against the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly import graph_objects as go

from kvnotes_interp.plots import style

if TYPE_CHECKING:
    import pandas as pd

_LINES = (  # kind, column, name, colour, dash, axis
    ("train", "loss", "training loss", style.GREY, "solid", "y"),
    ("validation", "kl", "validation KL", style.BLUE, "solid", "y"),
    ("validation", "token_f1", "token F1", style.GREEN, "solid", "y2"),
    ("validation", "exact_match", "exact match", style.ORANGE, "dash", "y2"),
)


def draw(metrics: pd.DataFrame, *, title: str, subtitle: str = "") -> go.Figure:
    """Draw the lines of metrics.jsonl. KL is in nats per answer, on a log scale."""
    fig = style.figure(title, subtitle, height=520, margin={"b": 110})
    for kind, column, name, colour, dash, axis in _LINES:
        rows = metrics[metrics["kind"] == kind]
        measured = kind == "validation"
        fig.add_trace(
            go.Scatter(
                x=rows["step"].tolist(),
                y=rows[column].tolist(),
                name=name,
                mode="lines+markers" if measured else "lines",
                line={"color": colour, "width": 2 if measured else 1, "dash": dash},
                marker={"size": 6, "color": colour},
                yaxis=axis,
                hovertemplate=f"{name}<br>step %{{x}}: %{{y:.4g}}<extra></extra>",
            )
        )
    fig.update_xaxes(title_text="Step", anchor="y2")
    fig.update_layout(
        yaxis={
            "title": {"text": "KL to full recompute (nats)"},
            "type": "log",
            "tickvals": style.LOG_TICKS,
            "domain": [0.44, 1.0],
        },
        yaxis2={
            **fig.layout.template.layout.yaxis.to_plotly_json(),
            "title": {"text": "Answers right"},
            "domain": [0.0, 0.34],
            "range": [-0.04, 1.04],
            "anchor": "x",
        },
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -0.16, "yanchor": "top"},
    )
    return fig
