"""Tables, on the terminal and in markdown, and the raw numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
BEGIN, END = "<!-- tables: written by `python -m benchmarks --write-readme` -->", "<!-- end of tables -->"


@dataclass(frozen=True)
class Table:
    """Cells are text already; notes are sentences under the table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return Group(table, *self.notes, "")

    def markdown(self) -> str:
        """The table as GitHub renders it."""
        line = lambda cells: "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"  # noqa: E731
        rule = line(["---", *["--:"] * (len(self.columns) - 1)])
        body = [f"### {self.title}", "", line(self.columns), rule, *map(line, self.rows)]
        return "\n".join([*body, *(f"\n{note}" for note in self.notes)]) + "\n"


@dataclass(frozen=True)
class Section:
    """What one part of the benchmark found."""

    name: str
    tables: tuple[Table, ...]
    raw: dict[str, Any]
    skipped: str = ""
    machine: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write `<name>.json`: machine, tables, and every raw number."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> Section:
        """Read what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        tables = tuple(
            Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), tuple(t["notes"]))
            for t in data.pop("tables")
        )
        return cls(tables=tables, **data)


def write_readme(sections: Sequence[Section], *, readme: Path = README) -> None:
    """Put the tables between the markers; what stands around them stays."""
    from benchmarks.machine import sentence

    parts = []
    for section in sections:
        if section.skipped:
            parts.append(f"### {section.name}\n\nNot run: {section.skipped}\n")
            continue
        parts += [table.markdown() for table in section.tables]
        parts.append(f"Measured on {sentence(section.machine)} Raw numbers: `results/{section.name}.json`.\n")
    text = readme.read_text(encoding="utf-8") if readme.is_file() else f"# Benchmarks\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{after}", encoding="utf-8")


def mib(n: float) -> str:
    """Bytes as whole mebibytes."""
    return f"{n / 2**20:,.0f} MiB"
