"""Probe cards: the ones in probes/ are sound, faults are named, and verdicts follow from the intervals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvnotes_interp import cards, probes
from kvnotes_interp.cards import Card
from kvnotes_interp.errors import InputError
from kvnotes_interp.results import Result, Summary

ROOT = Path(__file__).parent.parent
CARDS = cards.folder(ROOT / "probes")
GOOD: dict[str, Any] = {
    "claim": "The notes carry it.",
    "paper": "arXiv 2606.17107",
    "section": "Locality",
    "probe": "local_patching",
    "arms": {"derived": {"task": "pronoun"}, "verbatim": {"task": "capital"}},
    "expect": [{"value": "derived.field_only", "below": 0.25}],
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        path = tmp_path / "card.yaml"
        path.write_text(yaml.safe_dump({**GOOD, **changes}))
        return path

    return make


@pytest.mark.parametrize("path", CARDS, ids=lambda p: p.stem)
def test_cards_of_the_project_are_sound(path: Path) -> None:
    card = cards.read(path)
    assert card.claim.endswith(".")
    assert card.probe in cards.PROBES
    names = {
        "local_patching": "field_only downstream_only random_site",
        "suffix_concentration": "top8 k50",
        "linear_decodability": "accuracy_ write_depth commit_depth reads_new_",
        "circuit_ablation": "cut_ attention_ read_top12 scrub_",
        "attention_deviation": "interior_ top1_agreement_ logit_cosine_",
        "edit_frontier": "erratum field_only",
        "compaction_quality": "f1_ kl_",
        "compaction_survival": "gap_ decided_",
    }
    parts = tuple(names[card.probe].split())
    for expectation in card.expect:
        assert expectation.value.partition(".")[2].startswith(parts), expectation


def test_there_is_a_card_for_every_claim_of_the_first_version() -> None:
    wanted = {"locality", "verbatim_bound", "rule_order", "suffix_concentration", "keys_against_values"}
    assert wanted <= {path.stem for path in CARDS}
    assert set(cards.PROBES) <= set(probes.__all__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claim": None}, "claim: Input should be a valid string"),
        ({"probe": "local_patchin"}, 'Did you mean "local_patching"?'),
        ({"sed": 1}, 'sed: there is no such entry. Did you mean "seed"?'),
        ({"n": 0}, "n: Input should be greater than or equal to 1 (got '0')"),
        ({"arms": {}}, "arms"),
        ({"arms": {"derived": {"tsk": "pronoun"}}}, "arms.derived"),
        (
            {"arms": {"derived": {"task": "pronun"}}},
            'arms.derived.task: There is no task family "pronun". Did you mean',
        ),
        (
            {"arms": {"derived": {"task": "account_role", "options": {"filers": 3}}}},
            "arms.derived.options: there is no option 'filers'. Did you mean \"fillers\"?",
        ),
        ({"expect": []}, "expect"),
        ({"expect": [{"value": "derived.field_only"}]}, "give exactly one of above and below"),
        ({"expect": [{"value": "derived.field_only", "above": 0, "below": 1}]}, "give exactly one of above and below"),
        ({"expect": [{"value": "derivd.field_only", "above": 0}]}, 'Did you mean "derived"?'),
        ({"expect": [{"value": "field_only", "above": 0}]}, "should be arm.quantity"),
        ({"expect": [{"value": "derived.field_only", "above": "verbatm.field_only"}]}, 'Did you mean "verbatim"?'),
    ],
)
def test_faults_are_named(write: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    path = write(**changes)
    with pytest.raises(InputError) as caught:
        cards.read(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_is_no_card(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("claim: [\n")
    with pytest.raises(InputError, match="the card: Input should be a valid dictionary"):
        cards.read(tmp_path / "list.yaml")
    with pytest.raises(InputError, match="not valid YAML"):
        cards.read(tmp_path / "broken.yaml")
    with pytest.raises(InputError, match=r'there is no card .*\. Did you mean "list.yaml"'):
        cards.read(tmp_path / "lst.yaml")
    with pytest.raises(InputError, match="there is no card"):
        cards.read(tmp_path / "nowhere" / "x.yaml")


class FakeModel:
    name = "fake"


def fake_probe(values: dict[str, dict[str, tuple[float, float, float]]], seen: list[dict[str, Any]]) -> Any:
    """A probe that gives each family the quantities of `values`, as (mean, low, high)."""

    def local_patching(model: Any, pairs: Any, *, views: Any = (), seed: int = 0, **rest: Any) -> Result:
        import pandas as pd

        seen.append({"n": len(pairs), "seed": seed, "views": views, **rest})
        rows = [
            {"quantity": q, "mean": m, "low": low, "high": high, "n": len(pairs), "n_effective": len(pairs)}
            for q, (m, low, high) in values[pairs[0].family].items()
        ]
        summary = Summary.of(pairs[0].family, rows, counts={"n_tried": 1, "n_competent": 1, "set_aside": {}})
        return Result.build(probe="local_patching", frame=pd.DataFrame(), pairs=pd.DataFrame(), summary=summary)

    # The card's options are held against the keyword names of the probe.
    return local_patching


NAN = float("nan")
VALUES = {
    "pronoun": {"a": (0.1, 0.0, 0.2), "b": (0.9, 0.8, 1.0), "c": (0.5, NAN, NAN)},
    "capital": {"a": (0.3, 0.15, 0.4)},
}


@pytest.mark.parametrize(
    ("value", "side", "bound", "outcome"),
    [
        ("derived.a", "below", 0.21, "holds"),  # all of 0.0 to 0.2 lies below
        ("derived.a", "below", 0.2, "undecided"),  # its end touches the bound
        ("derived.a", "below", 0.1, "undecided"),
        ("derived.a", "below", -0.1, "fails"),
        ("derived.a", "above", 0.21, "fails"),
        ("derived.a", "above", -0.01, "holds"),
        ("derived.a", "above", 0.1, "undecided"),
        ("derived.b", "above", "derived.a", "holds"),
        ("derived.a", "above", "derived.b", "fails"),
        ("derived.a", "below", "derived.b", "holds"),
        ("derived.b", "below", "derived.a", "fails"),
        ("verbatim.a", "above", "derived.a", "undecided"),  # 0.15 to 0.4 and 0.0 to 0.2 overlap
        ("derived.c", "above", 0.0, "undecided"),  # one content: a mean without an interval proves nothing
        ("derived.a", "below", "derived.c", "undecided"),
    ],
)
def test_verdicts(monkeypatch: pytest.MonkeyPatch, value: str, side: str, bound: Any, outcome: str) -> None:
    monkeypatch.setattr(probes, "local_patching", fake_probe(VALUES, []))
    card = Card.model_validate({**GOOD, "expect": [{"value": value, side: bound}]})
    verdict = cards.run(card, FakeModel(), n=1, progress=False)  # type: ignore[arg-type]
    assert [found for *_, found in verdict.outcomes] == [outcome]
    entry = verdict.to_dict()["expectations"][0]
    assert entry["expected"] == f"{value} {side} {bound if isinstance(bound, str) else float(bound)}"
    assert "nan" not in entry["measured"]


def test_a_run_uses_what_the_card_says_and_keeps_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvnotes_interp.results.summary import render

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(probes, "local_patching", fake_probe(VALUES, seen))
    card = Card.model_validate({**GOOD, "n": 5, "seed": 7, "options": {"views": ["random"]}, "expect": [
        {"value": "derived.a", "below": 0.25}, {"value": "verbatim.a", "above": "derived.a"}]})  # fmt: skip
    verdict = cards.run(card, FakeModel(), out=tmp_path / "out", resume=True, progress=False)  # type: ignore[arg-type]
    assert [(s["n"], s["seed"], s["views"], s["resume"]) for s in seen] == [(5, 7, ["random"], True)] * 2
    assert [s["out"] for s in seen] == [tmp_path / "out" / "derived", tmp_path / "out" / "verbatim"]
    kept = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert kept == json.loads(json.dumps(verdict.to_dict()))
    assert [e["outcome"] for e in kept["expectations"]] == ["holds", "undecided"]
    assert (kept["paper"], kept["model"]) == (GOOD["paper"], "fake")
    text = render(verdict)
    assert max(map(len, text.splitlines())) <= 80
    assert "holds" in text
    cards.run(card, FakeModel(), n=2, progress=False)  # type: ignore[arg-type]
    assert seen[-1]["n"] == 2


def test_what_only_the_run_can_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card.model_validate({**GOOD, "options": {"view": ["random"]}})
    with pytest.raises(InputError, match=r"no option 'view'\. Did you mean .views."):
        cards.run(card, FakeModel(), progress=False)  # type: ignore[arg-type]
    card = Card.model_validate({**GOOD, "options": {"seed": 3}})
    with pytest.raises(InputError, match="no option 'seed'"):
        cards.run(card, FakeModel(), progress=False)  # type: ignore[arg-type]
    monkeypatch.setattr(probes, "local_patching", fake_probe(VALUES, []))
    card = Card.model_validate({**GOOD, "expect": [{"value": "derived.aa", "above": 0}]})
    with pytest.raises(InputError, match=r'"derived\.aa", which no arm measured\. Did you mean "derived\.a"'):
        cards.run(card, FakeModel(), n=1, progress=False)  # type: ignore[arg-type]
