"""Calibration: every probe on models whose answer is known, expected against measured.

The organisms are wired, not trained (see `organisms/structural.py`), so what a probe must find on them follows from the
wiring: on `notes` the field carries nothing and the full stops everything, on `direct` the reverse, on `mixed` each
some, on `null` nothing at all. A probe that misses one of these is wrong, whatever it says of a language model.

What this does not prove: that a probe is sensitive enough for effects that are small or spread out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvnotes_interp.progress import Bar

if TYPE_CHECKING:
    from kvnotes_interp.model import Model
    from kvnotes_interp.results import Result

MECHANISMS = ("notes", "direct", "mixed", "null")
EXACT = 1e-4  # float32 sweeps in batches: rounding, not an effect


@dataclass(frozen=True)
class Known:
    """What one quantity must be: between `low` and `high`."""

    organism: str
    probe: str
    quantity: str
    low: float
    high: float
    why: str

    @property
    def expected(self) -> str:
        """In words: a number, or a range."""
        middle = (self.low + self.high) / 2
        if self.high - self.low <= 2 * EXACT * 1.01:
            return f"{middle:g}"
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Finding:
    """A known quantity and what was measured."""

    known: Known
    measured: float

    @property
    def passed(self) -> bool:
        return math.isfinite(self.measured) and self.known.low <= self.measured <= self.known.high


@dataclass(frozen=True)
class Calibration:
    """All findings of one calibration."""

    findings: tuple[Finding, ...]
    seed: int

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.passed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [{**vars(f.known), "measured": f.measured, "passed": f.passed} for f in self.findings]
        return {"passed": self.passed, "seed": self.seed, "findings": rows}

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(title="Calibration on models whose answer is known", title_justify="left", pad_edge=False)
        for column in ("", "organism", "probe", "quantity", "expected", "measured"):
            table.add_column(column, justify="right" if column == "measured" else "left", overflow="fold")
        before = ""
        for f in self.findings:
            mark = "[green]✓[/]" if f.passed else "[red]✗[/]"
            name = f.known.organism if f.known.organism != before else ""
            before = f.known.organism
            value = f"{f.measured:.3f}".replace("-0.000", "0.000")
            table.add_row(mark, name, f.known.probe, f.known.quantity, f.known.expected, value)
        good = sum(f.passed for f in self.findings)
        return Group(table, f"{good} of {len(self.findings)} as expected" + ("" if self.passed else ": NOT calibrated"))


def calibrate(*, n: int = 12, seed: int = 0, device: str | None = None, progress: bool = True) -> Calibration:
    """Run every probe on every organism and hold what it finds against what the wiring says.

    Args:
        n: pairs per organism. seed: of the pairs and of the probes.
    """
    import torch

    from kvnotes_interp import tasks
    from kvnotes_interp.model import load

    pairs = tasks.load("signal", n=n, seed=seed)
    findings: list[Finding] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the organisms are too small to share a matrix product
    try:
        with Bar(total=len(MECHANISMS) * len(PROBES), description="calibrate", enabled=progress) as bar:
            for organism in MECHANISMS:
                model = load(f"organism:{organism}", device=device, dtype="float32")
                for probe in PROBES:
                    for quantity, measured, low, high, why in probe(model, organism, pairs, seed):
                        name = probe.__name__.removeprefix("_")
                        findings.append(Finding(Known(organism, name, quantity, low, high, why), measured))
                    bar.advance(1)
    finally:
        torch.set_num_threads(threads)
    return Calibration(tuple(findings), seed)


Expectation = tuple[str, float, float, float, str]  # quantity, measured, low, high, why


def _exactly(quantity: str, measured: float, value: float, why: str, *, within: float = EXACT) -> Expectation:
    return quantity, measured, value - within, value + within, why


def _mean(result: Result, quantity: str) -> float:
    rows = result.summary().rows
    found = rows.loc[rows["quantity"] == quantity, "mean"]
    return float(found.iloc[0]) if len(found) else math.nan


def _competent(result: Result, organism: str, n: int) -> Iterator[Expectation]:
    count = float(result.summary().counts["n_competent"])
    if organism == "null":
        yield _exactly("competent pairs", count, 0, "the field reaches nothing")
    else:
        yield "competent pairs", count, 0.9 * n, float(n), "the answers were fitted"


def _patching(model: Model, organism: str, pairs: Sequence[Any], seed: int) -> Iterator[Expectation]:
    from kvnotes_interp import probes

    found = probes.local_patching(
        model, pairs, views=("position", "layer", "random"), parts=("kv", "v"), seed=seed, progress=False
    )
    yield from _competent(found, organism, len(pairs))
    if organism == "null":
        return
    field, downstream = _mean(found, "field_only"), _mean(found, "downstream_only")
    if organism == "mixed":
        yield "field_only", field, 0.02, 0.98, "half of the heads let the decision token see the field"
        yield "downstream_only", downstream, 0.02, 0.98, "half of the heads take notes"
    else:
        notes = float(organism == "notes")
        yield _exactly("field_only", field, 1 - notes, "the wiring")
        yield _exactly("downstream_only", downstream, notes, "the wiring")
        yield _exactly("interaction", _mean(found, "interaction"), 0, "one way only")
    rows = found.frame[(found.frame["view"] == "position") & (found.frame["readout"] == "recovery")]
    others = rows[(rows["token"] != ".") & (rows["region"] != "field")]["value"].abs().max()
    yield _exactly("largest effect of any other position", float(others), 0, "only full stops take notes")


def _concentration(model: Model, organism: str, pairs: Sequence[Any], seed: int) -> Iterator[Expectation]:
    from kvnotes_interp import probes

    if organism == "null":
        return
    found = probes.suffix_concentration(model, pairs, seed=seed, progress=False)
    top, random = _mean(found, "top8_other_pairs"), _mean(found, "top8_random")
    if organism == "notes":
        yield _exactly("top 8, other pairs", top, 1, "there are fewer notes than eight")
        yield "random 8", random, -EXACT, 0.9, "most positions hold no note"
    if organism == "direct":
        yield _exactly("top 8, other pairs", top, 0, "nothing behind the field carries anything")
        yield _exactly("random 8", random, 0, "nothing behind the field carries anything")
    if organism == "mixed":
        yield "top 8, other pairs", top, 0.02, 0.98, "the notes carry some"


def _editing(model: Model, organism: str, pairs: Sequence[Any], seed: int) -> Iterator[Expectation]:
    from kvnotes_interp import probes

    if organism == "null":
        return
    found = probes.edit_frontier(
        model, pairs[:6], ks=(8,), rankings=("profiled",), wordings=("restate",), shares=(), seed=seed, progress=False
    )
    field, few = _mean(found, "field_only"), _mean(found, "recompute_top_8_profiled")
    if organism == "mixed":
        yield "field recomputed", field, 0.02, 0.98, "half of the heads"
    else:
        yield _exactly("field recomputed", field, float(organism == "direct"), "the wiring")
    if organism == "mixed":  # a note may work against the rest, and then does not rank among the first eight
        yield "field and eight positions recomputed", few, 0.9, 1.1, "field and notes are all there is"
    else:
        yield _exactly("field and eight positions recomputed", few, 1, "field and notes are all there is")


def _linear(model: Model, organism: str, pairs: Sequence[Any], seed: int) -> Iterator[Expectation]:
    from kvnotes_interp import probes

    if organism == "null":
        return
    found = probes.linear_decodability(
        model, pairs, classifiers=("mean_difference",), directions=(), draws=1, seed=seed, progress=False
    )
    rows = found.frame
    accuracy = rows[(rows["view"] == "decodability") & (rows["readout"] == "accuracy")]
    mean = accuracy.groupby(["site", "layer"], as_index=False)["value"].mean()
    notes = mean[mean["site"].str.startswith("aggregator")]["value"]
    yield "accuracy at the decision", _mean(found, "accuracy_decision_means"), 0.9, 1.0, "the answers were fitted"
    yield _exactly("before the field", _mean(found, "accuracy_before_means"), 0.5, "both prompts are the same there")
    if organism == "direct":
        yield _exactly("furthest from chance at a full stop", float((notes - 0.5).abs().max()), 0, "no notes are taken")
    else:
        yield "best full stop", float(notes.max()), 0.9, 1.0, "notes are taken"
    states = {name: _mean(found, f"reads_new_{name}") for name in ("field_only", "downstream_only")}
    if organism != "mixed":
        for state, value in states.items():
            reads = float((state == "field_only") == (organism == "direct"))
            yield f"decision reads new, {state.replace('_', ' ')}", value, reads - 0.1, reads + 0.1, "the wiring"


def _circuit(model: Model, organism: str, pairs: Sequence[Any], seed: int) -> Iterator[Expectation]:
    from kvnotes_interp import probes

    if organism == "null":
        return
    found = probes.circuit_ablation(
        model,
        pairs,
        analyses=("knockout", "scrub"),
        notes=4,
        draws=2,
        donors=1,
        grid_pairs=4,
        seed=seed,
        progress=False,
    )
    field, downstream = _mean(found, "cut_field_oracle"), _mean(found, "cut_downstream_oracle")
    if organism == "notes":
        yield _exactly("decision -> field cut", field, 1, "no such edge was there")
        yield "decision -> downstream cut", downstream, -1.0, 0.9, "the notes are read there"
    if organism == "direct":
        yield "decision -> field cut", field, -1.0, 0.9, "the field is read there"
        # What is left of the attention is renormalised, so the field weighs a little more.
        yield "decision -> downstream cut", downstream, 0.8, 1.3, "nothing behind the field is needed"
    if organism == "mixed":
        rows = found.frame
        one = rows[(rows["view"] == "edge_head") & (rows["site"] == "field") & (rows["readout"] == "recovery")]
        change = (one.groupby(["layer", "head"])["value"].mean() - 1).abs().groupby("head").max()
        half = len(change) // 2
        yield _exactly("field cut from a note head", float(change.iloc[:half].max()), 0, "it had no such edge")
        yield "field cut from a direct head", float(change.iloc[half:].max()), 0.01, 2.0, "it reads the field"
    note = _mean(found, "scrub_opposite_note")
    if organism == "notes":
        yield "the opposite note alone", note, 0.9, 1.1, "notes are all that is read"
    if organism == "direct":
        yield _exactly("the opposite note alone", note, 0, "no notes are read")


def _compaction(model: Model, organism: str, pairs: Sequence[Any], seed: int) -> Iterator[Expectation]:
    from kvnotes_interp import probes

    # Of the 22 slots the first eleven hold the field and no full stop, the last eleven all full stops and no field.
    fact, notes = (f"{name}_2x" for name in ("streaming@11", "streaming@0"))
    found = probes.compaction_survival(
        model,
        pairs[:6],
        compactors=("streaming@11", "streaming@0", "h2o"),
        ratios=(2,),
        draws=1,
        seed=seed,
        progress=False,
    )
    if organism == "null":
        yield _exactly("competent pairs", float(found.summary().counts["n_competent"]), 0, "nothing decides")
        return
    yield _exactly("first half: enrichment of the field", _mean(found, f"field_enrichment_{fact}"), 2, "22 slots to 11")
    yield _exactly(
        "last half: enrichment of full stops", _mean(found, f"delimiter_enrichment_{notes}"), 2, "22 slots to 11"
    )
    gaps = _by_arm(found, "survival", "gap")
    patched, edited = (_by_arm(found, "compact_edit", "effect", edit) for edit in ("field_patched", "field_edited"))
    if organism == "mixed":
        yield "first half: largest gap", float(gaps[fact].abs().max()), 0.02, 2.0, "half of the heads read the field"
        yield "last half: largest gap", float(gaps[notes].abs().max()), 0.02, 2.0, "half of the heads read the notes"
        yield _exactly("first half: field patched - gap", _largest(patched - gaps, fact), 0, "no note is left there")
        yield _exactly("last half: field patched", _largest(patched, notes), 0, "no field is left there")
        return
    kept, lost = (fact, notes) if organism == "direct" else (notes, fact)
    halves = {fact: "first half", notes: "last half"}
    # What is left of the attention is renormalised, so the gap need not be 1.
    yield f"{halves[kept]}: gap", _mean(found, f"gap_{kept}"), 0.5, 1.5, "all that is read is there"
    yield _exactly(f"{halves[lost]}: gap", _largest(gaps, lost), 0, "nothing that is read is there")
    # A dozen states are few to train on, so that only well above chance is asked for.
    yield f"{halves[kept]}: linear probe", _mean(found, f"decoded_{kept}"), 0.7, 1.0, "all that is read is there"
    yield _exactly(f"{halves[lost]}: linear probe", _mean(found, f"decoded_{lost}"), 0.5, "old and new are the same")
    unread = "delimiter" if organism == "direct" else "field"
    seen = max(abs(_mean(found, f"{unread}_attention_{arm}")) for arm in gaps.columns)
    yield _exactly(f"largest attention to the {unread}", seen, 0, "no such edge")
    if organism == "notes":
        yield _exactly("field patched, all compactors", _largest(patched), 0, "the field is not read")
    else:
        # H2O may keep other slots of the old cache than of the new one; the edited cache is the new one.
        copied = [arm for arm in gaps.columns if not arm.startswith("h2o")]
        yield _exactly("field patched - gap, fixed slots", _largest(patched - gaps, *copied), 0, "nothing else differs")
        yield _exactly("field edited - gap, all compactors", _largest(edited - gaps), 0, "nothing else differs")


def _by_arm(result: Result, view: str, readout: str, edit: str = "") -> Any:
    """Values as a table `[pair arm]`."""
    rows = result.frame[(result.frame["view"] == view) & (result.frame["readout"] == readout)]
    rows = rows[rows["edit"] == edit] if edit else rows
    return rows.pivot(index="pair", columns="site", values="value")


def _largest(table: Any, *arms: str) -> float:
    """Largest size among these arms, of all arms where none is named; NaN where a value is missing."""
    return float(table[list(arms or table.columns)].abs().max(skipna=False).max(skipna=False))


def _deviation(model: Model, organism: str, pairs: Sequence[Any], seed: int) -> Iterator[Expectation]:
    from kvnotes_interp import probes

    if organism == "null":
        return

    found = probes.attention_deviation(
        model,
        pairs[:6],
        operators=(("swapped", _under_another_value), "no_recompute"),
        seed=seed,
        min_gap=0.0,
        progress=False,
    )
    rows = found.frame
    kv = rows[(rows["view"] == "kv") & (rows["readout"] == "angle")]
    moved = kv[kv["site"] == "no_recompute"]["value"].max()
    here = kv[kv["site"] == "swapped"]["value"].max()
    yield "K, V of sentences prefilled alone", float(moved), 0.01, 3.2, "they have not seen each other"
    if organism == "direct":
        yield _exactly("K, V behind another field value", float(here), 0, "nothing behind the field sees it")
    else:
        yield "K, V behind another field value", float(here), 0.01, 3.2, "the notes do"


def _under_another_value(model: Model, blocks: Any) -> Any:
    """A cache of these tokens whose field holds its value, and whose later tokens have seen another one."""
    from kvnotes_interp import engine
    from kvnotes_interp.operators.made import Made
    from kvnotes_interp.sites import Site

    values = [model.tokenizer.convert_tokens_to_ids(f" {word}") for word in ("green", "red", "amber", "blue")]
    ids = list(blocks.context)
    at = next(slot for slot, token in enumerate(ids) if token in values)
    other = next(value for value in values if value != ids[at])
    under = engine.prefill(model, [*ids[:at], other, *ids[at + 1 :]])
    right = engine.prefill(model, ids)
    cache = replace(under, token_ids=right.token_ids).patched(Site((at,)), right)
    return Made(cache, len(ids), len(ids) * cache.n_layers)


PROBES: tuple[Callable[..., Iterator[Expectation]], ...] = (
    _patching,
    _concentration,
    _linear,
    _circuit,
    _deviation,
    _editing,
    _compaction,
)
