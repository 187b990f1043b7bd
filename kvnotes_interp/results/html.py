"""How a summary and a result look in a notebook: plain HTML that follows the notebook's own colours."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kvnotes_interp.results.summary import _bounds, _label, _show, _sizes

if TYPE_CHECKING:
    from kvnotes_interp.results.result import Result
    from kvnotes_interp.results.summary import Summary

_LEFT = ' style="text-align:left"'
_RIGHT = ' style="text-align:right;font-variant-numeric:tabular-nums"'


def summary_html(summary: Summary) -> str:
    """A table of the quantities, the counts, the controls and the notes."""
    head = "".join(
        f"<th{style}>{name}</th>"
        for name, style in (
            ("quantity", _LEFT),
            ("mean", _RIGHT),
            ("95% interval", _RIGHT),
            ("n (n<sub>eff</sub>)", _RIGHT),
            ("", _LEFT),
        )
    )
    body = []
    for row in summary.rows.to_dict("records"):
        note = row.get("note")
        body.append(
            f"<tr><td{_LEFT}>{escape(_label(row['quantity']))}</td><td{_RIGHT}>{_show(row.get('mean'))}</td>"
            f"<td{_RIGHT}>{_bounds(row.get('low'), row.get('high'))}</td>"
            f"<td{_RIGHT}>{_sizes(row.get('n'), row.get('n_effective'))}</td>"
            f"<td{_LEFT}>{escape(note) if isinstance(note, str) else ''}</td></tr>"
        )
    parts = [
        f"<p><b>{escape(summary.title)}</b></p>",
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>",
    ]
    if line := summary.counts_line():
        parts.append(f"<p>{escape(line)}</p>")
    if summary.controls:
        rows = "".join(
            f"<tr><td>{'✓' if c.passed else '<b>✗</b>'}</td><td{_LEFT}>{escape(_label(c.name))}"
            f"{' – ' + escape(c.detail) if c.detail else ''}</td>"
            f"<td{_RIGHT}>{c.value:.2g}</td><td{_LEFT}>≤ {c.tolerance:.2g}</td><td{_LEFT}>n = {c.n}</td></tr>"
            for c in summary.controls
        )
        passed = sum(c.passed for c in summary.controls)
        parts.append(
            f"<p><b>Controls: {passed} of {len(summary.controls)} passed</b></p><table><tbody>{rows}</tbody></table>"
        )
    parts += [f"<p><small>Note: {escape(note)}</small></p>" for note in summary.notes]
    return "<div>" + "".join(parts) + "</div>"


def result_html(result: Result) -> str:
    """The summary, and one line that says what the result holds."""
    kinds = ", ".join(f"<code>{escape(kind)}</code>" for kind in result.plots()) or "none"
    return (
        result.summary()._repr_html_()
        + f"<p><small>{len(result.frame):,} rows of probe <code>{escape(result.probe)}</code>; "
        f"plots: {kinds}. <code>.to_frame()</code>, <code>.plot(kind)</code>, <code>.save(path)</code></small></p>"
    )
