"""Calibration passes on the organisms as they are, and fails as soon as one of them is another."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    probes = {"patching", "concentration", "linear", "circuit", "deviation", "editing"}
    assert {probe for _, probe in seen} == probes
    assert {organism for organism, _ in seen} == set(calibrate.MECHANISMS)


@pytest.mark.parametrize(("named", "in_truth"), [("notes", "direct"), ("direct", "mixed"), ("null", "notes")])
def test_an_organism_that_is_another_is_noticed(
    named: str, in_truth: str, monkeypatch: pytest.MonkeyPatch, kvprobe: Callable[..., Any]
) -> None:
    real = models.load
    monkeypatch.setattr(models, "load", lambda name, **more: real(f"organism:{in_truth}", **more))
    monkeypatch.setattr(calibrate, "MECHANISMS", (named,))
    monkeypatch.setattr(calibrate, "PROBES", (calibrate._patching,))
    done = kvprobe("calibrate", "--n", 4, "--quiet")
    assert done.code == 1
    assert "NOT calibrated" in done.out
    assert "✗" in done.out
