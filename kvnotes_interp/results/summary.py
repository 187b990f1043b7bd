"""The small table that ends a run: quantities with intervals, what was set aside and why, and the controls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import faults_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

COLUMNS = ("quantity", "mean", "low", "high", "n", "n_effective", "note")
RESERVED = ("title", "n_competent", "n_tried", "set_aside", "controls", "notes")
WIDTH = 80


@dataclass(frozen=True)
class Control:
    """A check that gives the numbers their meaning. `value` must not exceed `tolerance`; `n` pairs were checked."""

    name: str
    passed: bool
    value: float
    tolerance: float
    n: int
    detail: str = ""


@dataclass(frozen=True)
class Summary:
    """Rows of quantities with 95 % intervals, counts of pairs, controls and notes.

    Args:
        title: one line that says what was measured, on which model and task.
        rows: columns quantity, mean, low, high, n (pairs), n_effective (contents, the unit resampled), note.
        counts: {"n_tried": int, "n_competent": int, "set_aside": {reason: int}}.
        controls: the checks of the run. notes: sentences shown under the table.
    """

    title: str
    rows: pd.DataFrame
    counts: Mapping[str, Any]
    controls: tuple[Control, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        missing = [c for c in ("quantity", "mean") if c not in self.rows.columns]
        if missing:
            raise InputError(f"the rows of a summary lack the column {missing[0]!r}; they need {COLUMNS}.")
        taken = [str(q) for q in self.rows["quantity"] if q in RESERVED]
        if taken:
            raise InputError(f"a quantity cannot be called {taken[0]!r}: the summary uses that key itself.")

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        counts: Mapping[str, Any],
        controls: Sequence[Control] = (),
        notes: Sequence[str] = (),
    ) -> Summary:
        """Build from a list of row dictionaries; keys that a row lacks are missing in the table."""
        import pandas as pd

        return cls(title, pd.DataFrame(list(rows), columns=list(COLUMNS)), counts, tuple(controls), tuple(notes))

    @property
    def passed(self) -> bool:
        """True when every control passed."""
        return all(control.passed for control in self.controls)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: one key per quantity, then counts, controls and notes; NaN becomes None."""
        out: dict[str, Any] = {"title": self.title}
        for row in self.rows.to_dict("records"):
            entry: dict[str, Any] = {key: _number(row.get(key)) for key in ("mean", "low", "high")}
            entry |= {key: _count(row.get(key)) for key in ("n", "n_effective")}
            note = row.get("note")
            if isinstance(note, str) and note:
                entry["note"] = note
            out[str(row["quantity"])] = entry
        out["n_competent"] = self.counts.get("n_competent")
        out["n_tried"] = self.counts.get("n_tried")
        out["set_aside"] = dict(self.counts.get("set_aside") or {})
        out["controls"] = {
            control.name: {
                key: _number(value) if isinstance(value, float) else value
                for key, value in asdict(control).items()
                if key != "name" and not (key == "detail" and not value)
            }
            for control in self.controls
        }
        out["notes"] = list(self.notes)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "the summary") -> Summary:
        """Undo `to_dict`. Raises InputError that names `where` for anything else."""
        with faults_of(where, "Copy the run's folder again."):
            return cls._from_dict(data)

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> Summary:
        rows = [{"quantity": key, **value} for key, value in data.items() if key not in RESERVED]
        controls = [
            Control(
                name=name,
                passed=bool(c["passed"]),
                value=_float(c.get("value")),
                tolerance=_float(c.get("tolerance")),
                n=int(c["n"]),
                detail=c.get("detail", ""),
            )
            for name, c in (data.get("controls") or {}).items()
        ]
        for row in rows:
            row.update({key: _float(row.get(key)) for key in ("mean", "low", "high")})
            row.update({key: _count(row.get(key)) for key in ("n", "n_effective")})
        counts: dict[str, Any] = {key: _count(data.get(key)) for key in ("n_tried", "n_competent")}
        counts["set_aside"] = {str(key): int(value) for key, value in (data.get("set_aside") or {}).items()}
        notes = [str(note) for note in data.get("notes") or ()]
        return cls.of(str(data.get("title", "")), rows, counts=counts, controls=controls, notes=notes)

    def counts_line(self) -> str:
        """`17 of 32 pairs competent; set aside: no flip 12, small gap 3`."""
        tried, competent = self.counts.get("n_tried"), self.counts.get("n_competent")
        if tried is None:
            return ""
        line = f"{competent} of {tried} pairs competent"
        aside = self.counts.get("set_aside") or {}
        if aside:
            order = sorted(aside.items(), key=lambda item: (-item[1], item[0]))
            line += "; set aside: " + ", ".join(f"{reason} {count}" for reason, count in order)
        return line

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        show_note = "note" in self.rows and any(isinstance(v, str) and v for v in self.rows["note"])
        table = Table(title=Text(self.title, style="bold"), title_justify="left", box=_box(), pad_edge=False)
        table.add_column("quantity", overflow="fold")
        table.add_column("mean", justify="right", no_wrap=True)
        table.add_column("95% interval", justify="right", no_wrap=True)
        table.add_column("n (n_eff)", justify="right", no_wrap=True)
        if show_note:
            table.add_column("note", overflow="fold", style="dim")
        for row in self.rows.to_dict("records"):
            cells = [
                Text(_label(row["quantity"])),
                _show(row.get("mean")),
                _bounds(row.get("low"), row.get("high")),
                _sizes(row.get("n"), row.get("n_effective")),
            ]
            if show_note:
                note = row.get("note")
                cells.append(Text(note if isinstance(note, str) else ""))
            table.add_row(*cells)
        parts: list[RenderableType] = [table]
        if line := self.counts_line():
            parts.append(Text(line))
        if self.controls:
            parts.append(_controls(self.controls))
        parts += [Text(f"Note: {note}", style="dim") for note in self.notes]
        return Group(*parts)

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        from kvnotes_interp.results.html import summary_html

        return summary_html(self)


def render(renderable: Any, *, width: int = WIDTH) -> str:
    """Plain text of a rich renderable, without colours and trailing blanks."""
    import io

    from rich.console import Console

    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
    )
    console.print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").split("\n"))


def _controls(controls: Sequence[Control]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    passed = sum(c.passed for c in controls)
    table = Table(
        title=Text(f"Controls: {passed} of {len(controls)} passed", style="bold"),
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    table.add_column("mark", no_wrap=True)
    table.add_column("name", overflow="fold")
    table.add_column("value", no_wrap=True, justify="right")
    table.add_column("tolerance", no_wrap=True)
    table.add_column("n", no_wrap=True)
    for control in controls:
        mark = Text("✓", style="green") if control.passed else Text("✗", style="bold red")
        name = Text(_label(control.name))
        if control.detail:
            name.append(f"  {control.detail}", style="dim")
        table.add_row(mark, name, f"{control.value:.2g}", f"≤ {control.tolerance:.2g}", f"n = {control.n}")
    return table


def _box() -> Any:
    from rich import box

    return box.SIMPLE_HEAD


def _label(name: object) -> str:
    return str(name).replace("_", " ")


def _show(value: object) -> str:
    number = _number(value)
    return "–" if number is None else f"{number:.3f}"


def _bounds(low: object, high: object) -> str:
    a, b = _number(low), _number(high)
    return "–" if a is None or b is None else f"{a:.3f} to {b:.3f}"


def _sizes(n: object, n_effective: object) -> str:
    a, b = _count(n), _count(n_effective)
    if a is None:
        return "–"
    return f"{a}" if b is None else f"{a} ({b})"


def _missing(value: object) -> bool:
    # None, NaN and pandas' NA, of which the last refuses a truth value.
    return value is None or type(value).__name__ in {"NAType", "NaTType"} or value != value


def _number(value: object) -> float | None:
    if _missing(value):
        return None
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else None


def _count(value: object) -> int | None:
    return None if _missing(value) else int(value)  # type: ignore[call-overload]


def _float(value: object) -> float:
    return math.nan if _missing(value) else float(value)  # type: ignore[arg-type]
