"""Linear probes on models whose answer is known, pushes against hooks made by hand, and runs that are killed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import engine, tasks
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.probes.linear import decodability as linear
from kvnotes_interp.probes.linear.decodability import fit_probe, linear_decodability
from kvnotes_interp.probes.linear.features import cached_features, final_sign, layers_of, places_of, samples_of
from kvnotes_interp.probes.linear.summary import chance_controls, layer_choice, write_depth
from kvnotes_interp.probes.linear.use import apply_probe, direction_of, pushed
from kvnotes_interp.probes.measure import Case, Sweeper, open_case
from kvnotes_interp.results import Result
from kvnotes_interp.tasks.polarity_pairs import polarity_pairs
from tests.reference import full_logits
from tests.tiny import tiny
from tests.tiny_tokenizer import tiny_tokenizer

SMALL: dict[str, Any] = {"folds": 3, "draws": 1, "direction_pairs": 2, "direction_layers": 2, "progress": False}
PLAIN = "who2:-1"  # a token after the field that takes no notes in any organism


@lru_cache(maxsize=4)
def organism(name: str) -> Any:
    return kv.load(f"organism:{name}", device="cpu", dtype="float64")


@lru_cache(maxsize=4)
def run(name: str) -> Result:
    where = ["before", PLAIN, "aggregator", "decision"]
    return linear_decodability(organism(name), tasks.load("signal", n=10, seed=3), positions=where, **SMALL)


def means(result: Result, view: str, readout: str, classifier: str = "logistic") -> pd.DataFrame:
    """Mean over pairs, one row per site, one column per layer."""
    frame = result.frame
    here = frame[(frame["view"] == view) & (frame["readout"] == readout) & (frame["classifier"] == classifier)]
    return here.pivot_table(index="site", columns="layer", values="value", aggfunc="mean")


@pytest.mark.parametrize("classifier", ["logistic", "mean_difference"])
def test_on_notes_the_delimiter_holds_the_conclusion_and_the_probe_follows_the_notes(classifier: str) -> None:
    accuracy = means(run("notes"), "decodability", "accuracy", classifier)
    assert (accuracy.loc["before"] == 0.5).all()
    assert (accuracy.loc[PLAIN] == 0.5).all()  # bit for bit the same in both prompts
    assert accuracy.loc["aggregator", 0] == 0.5  # the embedding of a full stop
    assert accuracy.loc["decision", [0, 1]].tolist() == [0.5, 0.5]  # a note is read one layer after it was written
    assert accuracy.loc["aggregator", 1:].min() > 0.75
    assert accuracy.loc["decision", 2:].min() > 0.75
    reads = means(run("notes"), "staleness", "reads_new", classifier)
    assert (reads.loc["field_only"] == reads.loc["stale"]).all()
    assert (reads.loc["downstream_only"] == reads.loc["oracle"]).all()
    assert reads.loc["oracle", 3] - reads.loc["stale", 3] > 0.5
    depth = run("notes").summary().rows.set_index("quantity")["mean"]
    assert depth["write_depth"] == pytest.approx(1 / 3)
    assert depth["field_lookup"] == 1.0  # four values, four answers: the field's identity would do


def test_on_direct_no_delimiter_holds_it_and_the_probe_follows_the_field() -> None:
    accuracy = means(run("direct"), "decodability", "accuracy")
    assert (accuracy.loc["aggregator"] == 0.5).all()
    assert accuracy.loc["decision", 1:].min() > 0.75
    reads = means(run("direct"), "staleness", "reads_new")
    assert (reads.loc["downstream_only"] == reads.loc["stale"]).all()
    assert (reads.loc["field_only"] == reads.loc["oracle"]).all()
    assert np.isnan(run("direct").summary().rows.set_index("quantity")["mean"]["write_depth"])


def test_on_null_there_is_nothing_to_probe() -> None:
    result = run("null")
    assert not result.pairs["competent"].any()
    assert "held-out probes need four or more" in str(result.summary()).replace("\n", " ")
    assert result.frame.empty


def test_selectivity_is_accuracy_minus_shuffled_and_rows_are_means_of_two_prompts() -> None:
    frame = run("notes").frame
    wide = frame[(frame["view"] == "decodability") & (frame["classifier"] == "logistic")].pivot_table(
        index=["pair", "site", "layer"], columns="readout", values="value"
    )
    assert (wide["selectivity"] - (wide["accuracy"] - wide["shuffled"])).abs().max() < 1e-12
    assert set(wide["accuracy"]) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert run("notes").summary().passed


# --- pushes ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def opened() -> Case:
    model = organism("mixed")
    encoded, _ = tasks.encode_all(model.tokenizer, tasks.load("signal", n=2, seed=5))
    return open_case(model, encoded[0], competence=Competence(0.0, 0.0), sweeper=Sweeper())


def by_hook(case: Case, slot: int, layer: int, vector: torch.Tensor) -> float:
    """The old prompt in one plain forward, with the vector added at the input of a layer."""

    def add(_module: Any, args: Any, kwargs: Any) -> Any:
        hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        hidden[:, slot] += vector
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    handle = case.model.hf.model.layers[layer].register_forward_pre_hook(add, with_kwargs=True)
    try:
        row = full_logits(case.model.hf, torch.tensor([case.pair.old_ids]))[0, -1]
    finally:
        handle.remove()
    return float(row[case.answers[1]] - row[case.answers[0]])


def test_a_push_is_the_one_made_by_a_hook() -> None:
    case = opened()
    generator = torch.Generator().manual_seed(0)
    for slot in (0, case.pair.field[1], case.pair.length - 1):
        pushes = [(layer, torch.randn(64, generator=generator, dtype=torch.float64)) for layer in (0, 1, 2)]
        got = pushed(case, "old", slot, pushes, rows=2)
        want = [by_hook(case, slot, layer, vector) for layer, vector in pushes]
        assert got == pytest.approx(want, abs=1e-9)
    assert max(abs(g - case.old) for g in got) > 1e-3  # the pushes do something


def test_the_difference_of_the_two_residuals_behind_the_last_layer_gives_the_new_logits() -> None:
    case = opened()
    slot = case.pair.length - 1
    both = engine.capture(case.model, None, [list(case.pair.old_ids), list(case.pair.new_ids)], slots=(slot,))
    assert both.residual is not None
    difference = both.residual[3, 1, 0] - both.residual[3, 0, 0]
    new = full_logits(case.model.hf, torch.tensor([case.pair.new_ids]))[0, -1]
    full, half = pushed(case, "old", slot, [(3, difference), (3, difference / 2)])
    assert full == pytest.approx(float(new[case.answers[1]] - new[case.answers[0]]), abs=1e-9)
    assert abs(half - full) > 1e-3


def test_a_direction_has_not_seen_its_row() -> None:
    samples, _ = samples_of(tasks.encode_all(organism("notes").tokenizer, tasks.load("signal", n=8, seed=3))[0])
    x = np.random.default_rng(0).normal(size=(16, 5))
    fold = linear.fit.grouped_folds(samples, folds=4)[0][0]
    row = int(fold.test[0])
    found = direction_of(x, samples, fold, row)
    changed = x.copy()
    changed[row] += 100
    again = direction_of(changed, samples, fold, row)
    assert found is not None
    assert again is not None
    assert (found[0] == again[0]).all()
    means = [
        x[[i for i in fold.train if samples.labels[i] == name]].mean(0)
        for name in (samples.labels[row], samples.rivals[row])
    ]
    assert found[0] == pytest.approx(means[0] - means[1])
    assert found[1] == pytest.approx((means[0] + means[1]) / 2)
    with pytest.raises(InputError, match="not held out"):
        direction_of(x, samples, fold, int(fold.train[0]))


def test_a_probe_reads_any_cache() -> None:
    model, pairs = organism("notes"), tasks.load("signal", n=10, seed=3)
    encoded, _ = tasks.encode_all(model.tokenizer, tasks.load("signal", n=1, seed=9))
    pair = encoded[0]
    tail = [pair.old_ids[-1]]
    old, new = (engine.prefill(model, list(ids[:-1])) for ids in (pair.old_ids, pair.new_ids))
    downstream = old.patched(kv.Site(range(*pair.downstream)), new)
    for feature in ("residual", "values"):
        layer = 3 if feature == "residual" else 2
        probe = fit_probe(model, pairs, layer=layer, feature=feature, classifier="mean_difference")
        assert (probe.feature, probe.layer) == (feature, layer)
        read = {
            name: apply_probe(model, probe, c, tail) for name, c in (("new", new), ("notes", downstream), ("old", old))
        }
        assert read["new"].shape == (1, 4)
        assert (read["new"] == read["notes"]).all()
        assert probe.classes[int(read["new"].argmax())] == pair.pair.answer_new
        assert probe.classes[int(read["old"].argmax())] == pair.pair.answer_old
    with pytest.raises(InputError, match="which layer"):
        apply_probe(model, linear.replace(probe, layer=-1), old, tail)


# --- features --------------------------------------------------------------------------------------------------------


def test_keys_without_rotation_are_the_same_for_a_token_wherever_it_stands() -> None:
    model = tiny("llama")
    cache = engine.prefill(model, [5, 7, 5, 9, 11, 5])
    keys, values = cached_features(cache, [0, 2, 5], [0, 1])
    assert keys.shape == values.shape == (3, 2, 1, 16)
    assert (keys[:, 0] - keys[:1, 0]).abs().max() < 1e-12
    assert (values[:, 0] - values[:1, 0]).abs().max() < 1e-12
    turned = cache.keys[0][0, :, [0, 2, 5]].permute(1, 0, 2).flatten(1)
    assert (turned - turned[:1]).abs().max() > 0.1  # as cached, they differ
    assert (keys[:, 1] - keys[:1, 1]).abs().max() > 0.1  # a layer later they have seen other tokens
    other, _ = cached_features(cache, [1], [0])
    assert (other[0, 0] - keys[0, 0]).abs().max() > 0.1


def test_places_have_names_that_prompts_share() -> None:
    tokenizer = tiny_tokenizer(512)
    rule, _ = tasks.encode_all(tokenizer, tasks.load("rule", n=30))
    pairs = rule[:4]
    assert len(pairs) >= 2
    places = places_of(pairs)
    assert list(places) == ["before", "field", "rule_end", "aggregator:-3", "aggregator", "decision"][
        : len(places)
    ] or {
        "before",
        "field",
        "rule_end",
        "aggregator",
        "decision",
    } <= set(places)
    for pair in pairs:
        key, text = pair.pair.key, "".join(pair.tokens_old[: places["rule_end"][pair.pair.key] + 1])
        assert text.rstrip().endswith(".")
        assert text.count("People on the") == 2
        assert "".join(pair.tokens_old[: places["aggregator"][key] + 1]).rstrip().endswith("on time.")
        assert places["decision"][key] == pair.length - 1
        assert places["before"][key] == pair.field[0] - 1
        assert places["field"][key] == pair.field[1] - 1
    assert list(places_of(pairs, ["aggregator", "field"])) == ["field", "aggregator"]
    with pytest.raises(InputError, match=r"'desision'.*Did you mean \"decision\""):
        places_of(pairs, ["desision"])


def test_labels_are_answers_or_outcomes() -> None:
    tokenizer = organism("notes").tokenizer
    encoded, _ = tasks.encode_all(tokenizer, tasks.load("signal", n=8))
    samples, kind = samples_of(encoded)
    assert kind == "answer"
    assert list(samples.labels[:2]) == [encoded[0].pair.answer_old, encoded[0].pair.answer_new]
    assert list(samples.rivals[:2]) == [encoded[0].pair.answer_new, encoded[0].pair.answer_old]
    rule, _ = tasks.encode_all(tiny_tokenizer(512), tasks.load("rule", n=30))
    samples, kind = samples_of(rule[:6])
    assert kind == "outcome"
    assert samples.classes == (" {case.x}", " {case.y}")


def test_layers_and_final_sign() -> None:
    assert layers_of(None, 30) == tuple(range(0, 31, 2))
    assert layers_of("all", 3) == (0, 1, 2, 3)
    with pytest.raises(InputError, match=r"0 \(the embedding\) to 3"):
        layers_of([4], 3)
    margins = np.array([[1.0, -1.0, 1.0, 2.0], [-1.0, -1.0, 1.0, 2.0], [1.0, 1.0, -1.0, 0.0], [1.0, 1.0, -3.0, 1.0]])
    assert final_sign(margins).tolist() == [2, 2, 2, 3]
    assert final_sign(np.ones((4, 1))).tolist() == [0]


# --- summary ---------------------------------------------------------------------------------------------------------


def rows(table: dict[str, list[float]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"pair": name, "content": name, "layer": layer, "value": value}
            for name, values in table.items()
            for layer, value in enumerate(values)
        ]
    )


def test_write_depth_and_layer_choice() -> None:
    accuracy = rows({"a": [0.5, 0.5, 1, 1, 1], "b": [0.5, 1, 1, 1, 1], "c": [0.5, 0.5, 0.5, 1, 1]})
    depth = write_depth(accuracy, 4)
    assert depth.mean == 0.75
    assert depth.n_effective == 3
    assert depth.low == 0.25
    assert depth.high == 0.75
    never = write_depth(rows({"a": [0.5, 0.5], "b": [0.5, 1.0]}), 1)
    assert np.isnan(never.mean)
    assert np.isnan(never.high)
    # c alone is best at layer 0, and it is not asked about itself
    choice = layer_choice(rows({"a": [0, 1, 0], "b": [0, 1, 0], "c": [9, 0, 0]}))
    assert choice == {"a": 0, "b": 0, "c": 1}


def test_controls_that_are_read_are_errors() -> None:
    def frame(shuffled: float, before: float) -> pd.DataFrame:
        about = {"view": "decodability", "part": "residual", "classifier": "logistic", "layer": 0}
        return pd.DataFrame(
            [
                {**about, "pair": str(i), "site": site, "readout": readout, "value": value}
                for i in range(40)
                for site, readout, value in (("decision", "shuffled", shuffled), ("before", "accuracy", before))
            ]
        )

    controls, notes = chance_controls(frame(0.55, 0.5), draws=1, title="t")
    assert [c.name for c in controls] == ["shuffled_labels", "nothing_before_field"]
    assert not notes
    assert controls[0].value == pytest.approx(0.05)
    assert controls[0].tolerance == pytest.approx(2.5 / 40**0.5)
    with pytest.raises(ControlError, match=r"'shuffled_labels' failed.*decision.*1.000 of 40 pairs"):
        chance_controls(frame(1.0, 0.5), draws=1, title="t")
    with pytest.raises(ControlError, match="'nothing_before_field' failed"):
        chance_controls(frame(0.5, 0.95), draws=1, title="t")
    few = frame(1.0, 1.0)
    assert "too few" in chance_controls(few[few["pair"].astype(int) < 20], draws=1, title="t")[1][0]


def test_rows_of_one_place_with_a_family_held_out() -> None:
    rng = np.random.default_rng(0)
    names, told = [], []
    for i in range(12):
        family, labels = ("one", "two")[i % 2], ("yes", "no") if rng.random() < 0.5 else ("no", "yes")
        names.append(SimpleNamespace(pair=SimpleNamespace(key=f"p{i}", content=f"c{i}", family=family)))
        for side in (0, 1):
            about = {"group": f"c{i}", "unit": f"p{i}", "family": family, "value": f"v{i}.{side}"}
            told.append({"label": labels[side], "rival": labels[1 - side], **about})
    samples = linear.fit.Samples.of(told)
    split, _ = linear.fit.grouped_folds(samples, folds=3)
    flips = linear.controls.swaps(samples, split, draws=1, seed=0)
    families = linear.fit.family_folds(samples)
    task = linear._Task(names, samples, split, split, families, flips, [])  # type: ignore[arg-type]
    sign = np.where(samples.labels == "yes", 1.0, -1.0)[:, None]
    # Dimension 0 says the same in both families, dimension 1 (much larger) the opposite.
    x = np.hstack([sign, 5 * sign * np.where(samples.families == "one", 1, -1)[:, None]])
    plan = {"classifiers": ["mean_difference"], "layers": [4]}
    about = {"site": "decision", "part": "residual", "layer": 4}
    for columns, want in (([0], 1.0), ([1], 0.0)):
        frame = linear.probe_rows(x[:, columns], task, plan, about, {}, seed=0)
        moved = frame[frame["view"] == "transfer"]
        assert list(moved["value"]) == [want] * 12
        assert list(moved["family"]) == ["one", "two"] * 6
    assert set(frame["readout"]) >= {
        "accuracy",
        "shuffled",
        "selectivity",
        "random_direction",
        "majority",
        "field_lookup",
    }
    assert (frame.loc[frame["readout"] == "majority", "value"] == 0.5).all()


def test_wrong_options() -> None:
    model, pairs = organism("notes"), tasks.load("signal", n=2)
    for wrong, match in (
        ({"features": ("residal",)}, 'Did you mean "residual"'),
        ({"classifiers": ("svm",)}, "choose from logistic, mean_difference"),
        ({"labels": "word"}, "auto, answer, outcome"),
        ({"draws": 0}, "at least one draw"),
        ({"layers": [7]}, "from 0"),
    ):
        with pytest.raises(InputError, match=match):
            linear_decodability(model, pairs, progress=False, **wrong)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_gives_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = organism("mixed"), tasks.load("signal", n=6, seed=3)
    options = {**SMALL, "positions": ["aggregator", "decision"], "classifiers": ("mean_difference",)}
    whole = linear_decodability(model, pairs, out=tmp_path / "whole", **options)
    calls = {"record": 0, "probe_rows": 0, "direction_rows": 0}
    stop: dict[str, int] = {}

    def counted(name: str) -> None:
        real = getattr(linear, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if calls[name] == stop.get(name, -1):
                del stop[name]
                raise KeyboardInterrupt
            calls[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(linear, name, call)

    for name in calls:
        counted(name)
    for kill in ({"record": 3}, {"probe_rows": 5}, {"direction_rows": 1}):
        stop.update(kill)
        with pytest.raises(KeyboardInterrupt):
            linear_decodability(model, pairs, out=tmp_path / "killed", resume=True, **options)
    resumed = linear_decodability(model, pairs, out=tmp_path / "killed", resume=True, **options)
    # Nothing was done twice: what was stopped had not begun to count.
    assert calls == {"record": len(whole.pairs), "probe_rows": 8, "direction_rows": 2}
    files = [(tmp_path / name / "table.parquet").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
    assert not (tmp_path / "killed" / "parts").exists()
    assert resumed.summary().to_dict() == whole.summary().to_dict()
    in_memory = linear_decodability(model, pairs, **options)
    pd.testing.assert_frame_equal(in_memory.frame, whole.frame)


# --- the 2 x 2 design ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["polarity", "gate"])
def test_a_square_keeps_the_field_and_exchanges_the_answers(family: str) -> None:
    pairs = polarity_pairs(family, n=12, seed=1)
    assert len({p.key for p in pairs}) == 12
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        assert first.content == second.content
        assert (first.field_old, first.field_new) == (second.field_old, second.field_new)
        assert (first.answer_old, first.answer_new) == (second.answer_new, second.answer_old)
        words = [text.replace(".", "").split() for text in (first.text_old, second.text_old)]
        differ = [(a, b) for a, b in zip(*words, strict=True) if a != b]
        assert 1 <= len(differ) <= 2  # one trigger, or two exchanged words
    flat = [(p.field_old, p.answer_old) for p in pairs] + [(p.field_new, p.answer_new) for p in pairs]
    for value in {v for v, _ in flat}:  # field and conclusion are independent, exactly
        answers = [a for v, a in flat if v == value]
        assert all(2 * answers.count(a) <= len(answers) for a in answers) or family == "gate"
    assert polarity_pairs(family, n=4, seed=1) == pairs[:4]


def test_squares_need_a_polarity() -> None:
    with pytest.raises(InputError, match="even number"):
        polarity_pairs(n=3)
    with pytest.raises(InputError, match='"pronoun" has 0 entries in a slot "polarity"'):
        polarity_pairs("pronoun", n=4)


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_writes_the_pronoun_and_not_before_the_name(smollm2: Any) -> None:
    pairs = tasks.pronoun(n=14, seed=0)
    options = {"layers": [0, 8, 16, 24, 30], "draws": 1, "direction_pairs": 2, "direction_layers": 1}
    result = linear_decodability(smollm2, pairs, max_aggregators=1, progress=False, **options)
    accuracy = means(result, "decodability", "accuracy")
    assert accuracy.loc["before"].to_list() == pytest.approx([0.5] * 5, abs=0.26)
    assert accuracy.loc["decision", [24, 30]].min() > 0.9
    assert accuracy.loc["decision", 0] == pytest.approx(0.5, abs=0.26)  # the embedding of a comma
    reads = means(result, "staleness", "reads_new")
    assert reads.loc["oracle", 30] > 0.9
    assert reads.loc["stale", 30] < 0.1
    assert result.summary().passed
