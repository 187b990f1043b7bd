"""Calibration passes on the organisms as they are, and fails as soon as one of them is another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import kvnotes_interp.model as models
from kvnotes_interp import calibrate


@pytest.mark.slow
def test_every_probe_finds_what_the_wiring_says(kvprobe: Callable[..., Any]) -> None:
    done = kvprobe("calibrate", "--json")
    assert done.code == 0, done.out
    found = json.loads(done.out)
    assert found["passed"]
    seen = {(row["organism"], row["probe"]) for row in found["findings"]}
    probes = {"patching", "concentration", "linear", "circuit", "deviation", "editing", "compaction"}
    assert {probe for _, probe in seen} == probes
    assert {organism for organism, _ in seen} == set(calibrate.MECHANISMS)


@pytest.mark.parametrize(("named", "in_truth"), [("notes", "direct"), ("direct", "mixed"), ("null", "notes")])
@pytest.mark.parametrize("probe", ["_patching", "_compaction"])
def test_an_organism_that_is_another_is_noticed(
    probe: str, named: str, in_truth: str, monkeypatch: pytest.MonkeyPatch, kvprobe: Callable[..., Any]
) -> None:
    real = models.load
    monkeypatch.setattr(models, "load", lambda name, **more: real(f"organism:{in_truth}", **more))
    monkeypatch.setattr(calibrate, "MECHANISMS", (named,))
    monkeypatch.setattr(calibrate, "PROBES", (getattr(calibrate, probe),))
    done = kvprobe("calibrate", "--n", 4, "--quiet")
    assert done.code == 1
    assert "NOT calibrated" in done.out
    assert "✗" in done.out


def test_a_compactor_that_keeps_other_slots_than_it_says_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field is kept where it should have been dropped, and the other way round."""
    from kvnotes_interp.operators import eviction

    real = eviction.find
    other = {"streaming@11": "streaming@0", "streaming@0": "streaming@11"}

    def swapped(name: str) -> Any:
        return replace(real(other.get(name, name)), name=name)

    monkeypatch.setattr(eviction, "find", swapped)
    monkeypatch.setattr(calibrate, "MECHANISMS", ("direct",))
    monkeypatch.setattr(calibrate, "PROBES", (calibrate._compaction,))
    failed = {finding.known.quantity for finding in calibrate.calibrate(n=4, progress=False).failures}
    assert {"first half: enrichment of the field", "first half: gap", "last half: gap"} <= failed
    assert "field patched - gap, fixed slots" not in failed, "which slots are kept plays no part in it"
