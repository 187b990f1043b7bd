"""From a result's tidy rows to what a figure shows: competent pairs, means with intervals, words for the title."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from kvnotes_interp.errors import InputError
from kvnotes_interp.stats import bootstrap_mean

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kvnotes_interp.results import Result


def rows_of(result: Result, view: str, *, part: str | None = "kv", readout: str = "recovery") -> pd.DataFrame:
    """Rows of one view, of competent pairs, with a finite value. `part=None` keeps all parts.

    Raises InputError when there are none.
    """
    frame = result.frame
    found = frame[(frame["view"] == view) & (frame["readout"] == readout) & frame["value"].notna()]
    if part is not None and len(found):
        parts = sorted(set(found["part"]))
        found = found[found["part"] == part]
        if not len(found):
            raise InputError(f"part={part!r}: the view {view!r} holds only {parts}.")
    if "competent" in result.pairs and len(result.pairs):
        competent = result.pairs.loc[result.pairs["competent"].fillna(False).astype(bool), "pair"]
        found = found[found["pair"].isin(set(competent))]
    if not len(found):
        raise InputError(f"this result holds no {readout} of a competent pair in the view {view!r}.")
    return found


def has(result: Result, view: str, *, part: str | None = "kv", readout: str = "recovery") -> bool:
    """Whether `rows_of` would find rows of this view."""
    try:
        return len(rows_of(result, view, part=part, readout=readout)) > 0
    except InputError:
        return False


def per_pair(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Mean over repeated draws, so that every pair counts once for every group."""
    return rows.groupby([*by, "pair", "content"], sort=True, dropna=False)["value"].mean().reset_index()


def seed_of(result: Result) -> int:
    """The seed of the run, which its summary's intervals were drawn with: a picture must show the bounds of its table.

    0 for a result without a request, such as one that was built in memory.
    """
    options = (result.manifest.get("request") or {}).get("options") or {}
    return int(options.get("seed") or 0)


def intervals(result: Result, rows: pd.DataFrame, by: list[str], *, sort: bool = True) -> pd.DataFrame:
    """One row per group: the group's columns, mean, low, high, n (pairs), n_effective (contents).

    Each pair counts once, whatever its number of rows; `result` gives the seed, see `seed_of`.
    """
    out: list[dict[str, Any]] = []
    seed = seed_of(result)
    for keys, group in per_pair(rows, by).groupby(by, sort=sort, dropna=False):
        interval = bootstrap_mean(group["value"].to_numpy(dtype=float), group["content"].tolist(), seed=seed)
        out.append({**dict(zip(by, keys, strict=True)), **interval.to_dict()})
    return pd.DataFrame(out)


def about(result: Result, rows: pd.DataFrame, *, interval: str = "Band", more: str = "") -> str:
    """`smollm2-135m, pronoun. n = 17 of 32 pairs (8 contents). Band: 95% bootstrap over contents.`

    `interval` names the mark that shows the interval; '' where none is shown.
    """
    n, contents, tried = rows["pair"].nunique(), rows["content"].nunique(), len(result.pairs)
    who = ", ".join(x for x in (model_name(result), families(rows)) if x)
    text = f"{who}. " if who else ""
    text += f"n = {n} of {tried} pairs" if tried > n else f"n = {n} pairs"
    text += f" ({contents} contents)" if contents != n else ""
    if interval:
        text += f". {interval}: 95% bootstrap over contents"
    return f"{text}. {more}".strip()


def families(rows: pd.DataFrame) -> str:
    """Names of the task families, at most three."""
    names = sorted(set(rows["family"]) - {""})
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} families"


def model_name(result: Result) -> str:
    """The model as the request named it, or ''."""
    request = result.manifest.get("request") or {}
    model = request.get("model") or request.get("source") or ""
    if isinstance(model, dict):
        model = model.get("name") or model.get("repo") or ""
    return str(model)


def pair_row(result: Result, rows: pd.DataFrame, pair: str | None) -> pd.Series:
    """The named pair, or the one whose score gap is the median of those in `rows`.

    Raises InputError for a pair that is not there.
    """
    from kvnotes_interp.errors import nearest

    table = result.pairs[result.pairs["pair"].isin(set(rows["pair"]))]
    if pair is not None:
        chosen = table[table["pair"] == pair]
        if not len(chosen):
            raise InputError(
                f"pair={pair!r} has no rows to draw here.{nearest(str(pair), table['pair'])} "
                f"Competent pairs: {', '.join(table['pair'].head(5))}" + (", ..." if len(table) > 5 else ".")
            )
        return chosen.iloc[0]
    if not len(table):
        raise InputError("this result's table of pairs does not list the pairs of its frame.")
    gap = (table["s_new"] - table["s_old"]).fillna(0.0)
    ordered = table.assign(_gap=gap).sort_values(["_gap", "pair"])
    return ordered.iloc[(len(ordered) - 1) // 2]


def remember(fig: Figure, kind: str, result: Result, table: pd.DataFrame) -> Figure:
    """Keep the plotted data inside the figure, where the JSON, the HTML and `export.write` find it."""
    columns = {str(name): [None if pd.isna(v) else v for v in table[name].tolist()] for name in table.columns}
    fig.update_layout(meta={"kind": kind, "probe": result.probe, "table": columns})
    return fig
