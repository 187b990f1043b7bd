"""nnsight: the same numbers as this package's own probes and plain hooks, the same tables, and refusals that refuse."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from kvnotes_interp import compat, probes, tasks
from kvnotes_interp.adapters import nnsight as adapter
from kvnotes_interp.adapters import traces
from kvnotes_interp.errors import ControlError, InputError, UnsupportedError
from kvnotes_interp.model import Model
from kvnotes_interp.results import Result
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair, Pair
from tests.adapters.conftest import Maker
from tests.reference import answer_with_cache, full_cache, patched

pytest.importorskip("nnsight", reason="nnsight is not installed: pip install -e '.[nnsight]'")

LENIENT: dict[str, Any] = {"min_gap": 0.0, "min_gap_noise": 0.0, "progress": False}
VIEWS = ("position", "layer", "region", "random")
# Key norms, sliding windows and soft-capping, a fused projection, parallel blocks, other names, scaled residuals.
NAMES = (
    "llama",
    "llama_biased",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "gpt_neox",
    "cohere",
    "granite",
    "qwen3_moe",
)


@pytest.fixture(scope="module")
def model(make: Maker) -> Model:
    return make("llama", seed=6)


@pytest.fixture(scope="module")
def few(model: Model, pairs: list[Pair]) -> list[Pair]:
    """Four pairs of different contents, two of which this model changes its answer on."""
    found = probes.local_patching(model, pairs[:5], views=(), parts=("kv",), **LENIENT).pairs
    good = set(found.loc[found["competent"], "pair"])
    assert len(good) == 2, "choose another seed"
    return [p for p in pairs[:5] if p.key in good] + [p for p in pairs[:5] if p.key not in good][:2]


@pytest.fixture(scope="module")
def through_nnsight(model: Model, few: list[Pair]) -> Result:
    return adapter.local_patching(model, few, parts=("kv", "k", "v"), views=VIEWS, draws=3, **LENIENT)


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_nnsight_computes_what_this_package_computes(name: str, make: Maker) -> None:
    report = adapter.parity(make(name)).require()
    assert set(report.kinds) == {"keys", "values", "heads", "logits", "patched decisions", "ablated decisions"}
    assert report.worst("patched decisions").value < 1e-9
    assert report.worst("keys").value < 1e-9
    assert report.worst("ablated decisions").value < 1e-5  # the two softmaxes differ in precision


def test_a_request_that_was_shipped_computes_the_same(make: Maker) -> None:
    """`remote="local"`: the request is serialised, read back with this package hidden, and run."""
    report = adapter.parity(make("qwen3"), remote="local").require()
    assert report.worst("patched decisions").value < 1e-9


# --- local patching ---------------------------------------------------------------------------------------------------


def test_local_patching_is_the_probes_own_table(model: Model, few: list[Pair], through_nnsight: Result) -> None:
    ours = probes.local_patching(model, few, parts=("kv", "k", "v"), views=VIEWS, draws=3, **LENIENT)
    mine, theirs = ours.frame, through_nnsight.frame
    assert list(theirs.columns) == list(mine.columns)
    assert theirs.drop(columns="value").equals(mine.drop(columns="value"))
    measured = (mine["view"] != "control").to_numpy()
    assert measured.sum() > 300
    np.testing.assert_allclose(theirs["value"][measured], mine["value"][measured], rtol=0, atol=1e-6)
    spread = mine.loc[(mine["view"] == "position") & (mine["readout"] == "recovery"), "value"]
    assert float(spread.max() - spread.min()) > 0.1, "else the two could agree on nothing"


def test_the_summary_holds_the_same_quantities(model: Model, few: list[Pair], through_nnsight: Result) -> None:
    ours = probes.local_patching(model, few, parts=("kv", "k", "v"), views=VIEWS, draws=3, **LENIENT).summary()
    theirs = through_nnsight.summary()
    assert list(theirs.rows["quantity"]) == list(ours.rows["quantity"])
    np.testing.assert_allclose(theirs.rows["mean"].astype(float), ours.rows["mean"].astype(float), atol=1e-6)
    assert {c.name for c in theirs.controls} == {"no_patch", "self_patch", "everything", "before_field"}
    assert theirs.passed
    assert theirs.counts == ours.counts


def test_plots_and_run_folders_work_as_they_do(model: Model, few: list[Pair], tmp_path: Path) -> None:
    options = {"views": ("position", "layer_position"), "draws": 2, **LENIENT}
    result = adapter.local_patching(model, few[:2], out=tmp_path / "run", **options)
    assert {"map", "states", "strip"} <= set(result.plots())
    assert result.plot("map").data
    loaded = Result.load(tmp_path / "run")
    assert loaded.frame.equals(result.frame)
    assert loaded.manifest["request"]["options"]["engine"].startswith("nnsight 0.")
    assert loaded.manifest["sweep_path"] == ["nnsight"]
    again = adapter.local_patching(model, few[:2], out=tmp_path / "run", resume=True, **options)
    assert again.frame.equals(result.frame)


def test_in_float32_it_agrees_as_well(make: Maker, few: list[Pair]) -> None:
    model = make("llama", seed=6, dtype=torch.float32)
    options = {"views": ("position",), "parts": ("kv",), **LENIENT}
    ours, theirs = (f(model, few, **options).frame for f in (probes.local_patching, adapter.local_patching))
    measured = (ours["view"] != "control").to_numpy()
    np.testing.assert_allclose(theirs["value"][measured], ours["value"][measured], rtol=1e-4, atol=1e-4)


def test_a_model_that_nnsight_opened_is_run_as_if_it_were_remote(
    model: Model, few: list[Pair], through_nnsight: Result, tmp_path: Path
) -> None:
    """A folder of weights opened by nnsight itself, every request shipped: the path to NDIF but for the network."""
    from nnsight import TransformersModel

    hf = copy.deepcopy(model.hf)
    hf.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    nn = TransformersModel(str(tmp_path), task="text-generation", tokenizer=str(tmp_path), dtype=torch.float64)
    got = adapter.local_patching(
        nn, few[:2], remote="local", parts=("kv", "k", "v"), views=VIEWS, draws=3, rows=64, **LENIENT
    )
    want = through_nnsight.frame[through_nnsight.frame["pair"].isin({p.key for p in few[:2]})].reset_index(drop=True)
    measured = (want["view"] != "control").to_numpy()
    np.testing.assert_allclose(got.frame["value"][measured], want["value"][measured], rtol=0, atol=1e-6)
    assert got.manifest["request"]["options"]["remote"] == "local"


def test_patching_inside_one_forward_is_another_question(
    model: Model, few: list[Pair], through_nnsight: Result
) -> None:
    """What this adapter must not do: later tokens read a patched key again, and carry it upward."""
    from nnsight import TransformersModel

    rows = through_nnsight.frame
    pair = _encoded(model, few[0])
    nn = TransformersModel(copy.deepcopy(model.hf), tokenizer=model.tokenizer, task="text-generation")
    old, new = torch.tensor([pair.old_ids]), torch.tensor([pair.new_ids])
    at = pair.field[0]
    donor = []
    with nn.trace(new):
        for layer in nn.model.layers:
            donor.append((layer.self_attn.k_proj.output.save(), layer.self_attn.v_proj.output.save()))
    with nn.trace(old):
        for layer, (k, v) in zip(nn.model.layers, donor, strict=True):
            layer.self_attn.k_proj.output[:, at] = k[:, at]
            layer.self_attn.v_proj.output[:, at] = v[:, at]
        logits = nn.lm_head.output[0, -1].save()
    loose = float(logits[pair.answer_new_id] - logits[pair.answer_old_id])
    here = (
        (rows["pair"] == few[0].key) & (rows["view"] == "position") & (rows["position"] == at) & (rows["part"] == "kv")
    )
    ours = float(rows.loc[here & (rows["readout"] == "logit_diff"), "value"].iloc[0])
    assert abs(loose - ours) > 1e-3


# --- head ablation ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_hooks(model: Model, pair: EncodedPair, layer: int, head: int, put: Tensor) -> float:
    """`s` of the new prompt with one head's output at its last token replaced, by a plain hook in one full forward."""
    d = model.shape.d_head

    def hook(_module: Any, args: Any) -> Any:
        value = args[0].clone()
        value[0, -1, head * d : (head + 1) * d] = put
        return (value, *args[1:])

    handle = compat.output_projection(compat.layers(model.hf)[layer]).register_forward_pre_hook(hook)
    try:
        logits = model.hf(torch.tensor([pair.new_ids]), use_cache=False).logits[0, -1]
    finally:
        handle.remove()
    return float(logits[pair.answer_new_id] - logits[pair.answer_old_id])


@torch.no_grad()
def outputs_by_hooks(model: Model, ids: tuple[int, ...]) -> Tensor:
    """Every head's output at the last token, `[layer head d_head]`, by plain hooks."""
    found: list[Tensor] = []
    keep = lambda _m, args: found.append(args[0][0, -1])  # noqa: E731
    handles = [compat.output_projection(x).register_forward_pre_hook(keep) for x in compat.layers(model.hf)]
    model.hf(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(found).view(len(found), model.shape.n_heads, -1)


@pytest.mark.parametrize(("name", "seed"), [("llama", 6), ("gpt_neox", 3)])  # seeds that change an answer or two
def test_head_ablation_is_what_plain_hooks_make_of_it(name: str, seed: int, make: Maker, pairs: list[Pair]) -> None:
    model = make(name, seed=seed)
    few = pairs[:4]
    result = adapter.head_ablation(model, few, ablations=("resample", "mean", "zero"), **LENIENT)
    rows = result.frame[(result.frame["view"] == "read_head") & (result.frame["readout"] == "logit_diff")]
    key = next(iter(rows["pair"]))
    encoded, _ = tasks.encode_all(model.tokenizer, few)
    pair = next(p for p in encoded if p.pair.key == key)
    others = [p for p in encoded if p.pair.content != pair.pair.content]
    both = [outputs_by_hooks(model, ids) for p in others for ids in (p.old_ids, p.new_ids)]
    stand_in = {
        "resample": outputs_by_hooks(model, pair.old_ids),
        "mean": torch.stack(both).mean(0),
        "zero": torch.zeros_like(both[0]),
    }
    here = rows[rows["pair"] == key]
    assert len(here) == 3 * model.shape.n_layers * model.shape.n_heads
    for row in here.to_dict("records"):
        layer, head = int(row["layer"]), int(row["head"])
        want = by_hooks(model, pair, layer, head, stand_in[row["ablation"]][layer, head])
        assert row["value"] == pytest.approx(want, abs=1e-6), row
    values = here.set_index("ablation")["value"]
    assert values["zero"].std() > 1e-3, "else no head does anything"
    assert float((values["zero"].to_numpy() - values["mean"].to_numpy()).std()) > 1e-4


def test_the_ablation_result_is_complete(model: Model, few: list[Pair], tmp_path: Path) -> None:
    result = adapter.head_ablation(model, few, layers=(1, 2), heads=(0, 3), out=tmp_path / "run", **LENIENT)
    rows = result.frame[result.frame["view"] == "read_head"]
    assert set(zip(rows["layer"], rows["head"], strict=True)) == {(1, 0), (1, 3), (2, 0), (2, 3)}
    assert set(rows["ablation"]) == {"resample"}
    controls = {c.name: c for c in result.summary().controls}
    assert set(controls) == {"no_heads", "own_heads", "all_heads"}
    assert all(c.passed for c in controls.values())
    table = result.summary().rows.set_index("quantity")
    mean = rows[rows["readout"] == "recovery"].groupby(["layer", "head"])["value"].mean()
    assert table.loc["resample_strongest", "mean"] == pytest.approx(1 - mean.min())
    assert table.loc["resample_mean", "mean"] == pytest.approx(1 - mean.mean())
    assert Result.load(tmp_path / "run").frame.equals(result.frame)


def test_ablation_of_a_shipped_request_is_the_same(model: Model, few: list[Pair]) -> None:
    options = {"ablations": ("zero",), "layers": (0,), **LENIENT}
    here = adapter.head_ablation(model, few[:2], **options).frame
    shipped = adapter.head_ablation(model, few[:2], remote="local", **options).frame
    pd.testing.assert_frame_equal(here, shipped, check_exact=False, atol=1e-9, rtol=0)


# --- controls and refusals --------------------------------------------------------------------------------------------


def test_a_mask_of_the_new_token_alone_is_refused(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nnsight invents when the cache goes by a name that it does not know: no error, wrong numbers."""
    model = make("qwen3")
    monkeypatch.setattr(traces, "tail_mask", lambda rows, n_pos: torch.ones(rows, 1, dtype=torch.long))
    with pytest.raises(UnsupportedError, match=r"nnsight 0\..* and transformers 5\..*patched decisions off by"):
        adapter.local_patching(model, [], **LENIENT)
    monkeypatch.undo()
    with pytest.raises(InputError, match="no pairs"):
        adapter.local_patching(model, [], **LENIENT)


def test_a_patch_that_is_not_applied_is_refused(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    right = traces.Traced._step

    def nothing_is_patched(self: Any, sites: Any, *args: Any) -> Any:
        return right(self, [Site(())] * len(sites), *args)

    monkeypatch.setattr(traces.Traced, "_step", nothing_is_patched)
    report = adapter.parity(make("llama"))
    assert report.worst("patched decisions").value == pytest.approx(1.0, abs=1e-6)
    assert {g.kind for g in report.failures} == {"patched decisions"}


def test_heads_that_are_not_replaced_are_refused(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    right = traces.Traced._step

    def no_heads(self: Any, sites: Any, heads: Any, *args: Any) -> Any:
        return right(self, sites, [None] * len(heads), *args)

    model = make("llama")
    monkeypatch.setattr(traces.Traced, "_step", no_heads)
    with pytest.raises(UnsupportedError, match="ablated decisions off by 1 "):
        adapter.head_ablation(model, [], **LENIENT)


def test_a_patch_lost_after_the_check_fails_a_control(
    model: Model, few: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.local_patching(model, few[:1], views=(), **LENIENT)  # the check has passed
    right = traces.Traced._step

    def values_only(self: Any, sites: Any, *args: Any) -> Any:
        return right(self, [dataclasses.replace(s, part="v") for s in sites], *args)

    monkeypatch.setattr(traces.Traced, "_step", values_only)
    with pytest.raises(ControlError, match=r"control 'everything' failed"):
        adapter.local_patching(model, few[:1], views=(), **LENIENT)

    def other_heads(self: Any, sites: Any, heads: Any, *args: Any) -> Any:
        flipped = [h and dataclasses.replace(h, take=h.take.roll(1, dims=0) & (h.outputs != 7).any(-1)) for h in heads]
        half = [h and dataclasses.replace(h, take=h.take & (torch.arange(h.take.shape[1]) > 0)) for h in flipped]
        return right(self, sites, half, *args)

    monkeypatch.setattr(traces.Traced, "_step", other_heads)
    with pytest.raises(ControlError, match=r"control 'all_heads' failed"):
        adapter.head_ablation(model, few[:1], **LENIENT)


def test_a_meta_model_is_described_without_its_weights(model: Model, tmp_path: Path) -> None:
    from nnsight import TransformersModel

    model.hf.config.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    nn = TransformersModel(str(tmp_path), task="text-generation", tokenizer=str(tmp_path))
    described = adapter._described(nn)
    assert described.shape == dataclasses.replace(model.shape)
    assert {p.device.type for p in nn._module.parameters()} == {"meta"}
    opened = traces.Traced(nn, described, remote=True)
    assert len(opened.outs) == model.shape.n_layers


def test_wrong_input_is_named(model: Model, few: list[Pair]) -> None:
    with pytest.raises(InputError, match="weights are on the server"):
        adapter.local_patching(model, few, remote=True)
    with pytest.raises(InputError, match=r"neither a kvnotes_interp Model nor an nnsight\.TransformersModel"):
        adapter.local_patching(model.hf, few)
    with pytest.raises(InputError, match='Did you mean "resample"'):
        adapter.head_ablation(model, few, ablations=("resampled",))
    with pytest.raises(InputError, match="heads holds 4, but the model has 4"):
        adapter.head_ablation(model, few, heads=(4,))
    with pytest.raises(InputError, match="one content only"):
        adapter.head_ablation(model, few[:1], ablations=("mean",))
    with pytest.raises(InputError, match="rows=0"):
        adapter.local_patching(model, few, rows=0)
    with pytest.raises(InputError, match="needs a tokenizer"):
        adapter.parity(dataclasses.replace(model, tokenizer=None))


def test_the_decision_is_that_of_a_cache_patched_by_hand(model: Model, few: list[Pair]) -> None:
    """Against code that shares nothing with either side: cloned caches, overwritten cell by cell."""
    pair = _encoded(model, few[0])
    old, new = torch.tensor([pair.old_ids]), torch.tensor([pair.new_ids])
    n = old.shape[1] - 1
    traced = traces.Traced(traces.open_nnsight(model.hf, model.tokenizer), model, rows=2)
    sites = [
        Site((pair.field[0],)),
        Site((n - 1,), layers=(2,), part="k"),
        Site(tuple(range(n)), layers=(0, 1), part="v"),
    ]
    answers = (pair.answer_old_id, pair.answer_new_id)
    got = traced.decide(pair.old_ids[:-1], pair.new_ids[:-1], pair.old_ids[-1], sites, answers)
    base, donor = full_cache(model.hf, old[:, :n]), full_cache(model.hf, new[:, :n])
    for row, site in zip(got, sites, strict=True):
        kvs = patched(base, donor, layers=site.layers, positions=site.positions, part=site.part)
        want = answer_with_cache(model.hf, kvs, old[:, n:], torch.tensor([n]))[0, -1, list(answers)]
        torch.testing.assert_close(row, want, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_what_nnsight_breaks_on_import_is_made_before_it() -> None:
    """nnsight gives every object a `save`; anyio's classes refuse that when they are made later."""
    code = "import nnsight; from anyio.abc import SocketAttribute; import anyio.streams.file"
    first = "from kvnotes_interp.adapters.traces import _before_nnsight as f; f(); "
    run = lambda text: subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)  # noqa: E731
    assert run(first + code).returncode == 0
    if importlib.util.find_spec("anyio") is not None:
        alone = run(code)
        assert alone.returncode == 0 or "missing its type annotation" in alone.stderr


@pytest.mark.slow
def test_smollm2_through_nnsight(smollm2: Model) -> None:
    pairs = tasks.load("pronoun", n=2, seed=0)
    options: dict[str, Any] = {"views": ("region",), "parts": ("kv",), "progress": False}
    ours = probes.local_patching(smollm2, pairs, **options)
    theirs = adapter.local_patching(smollm2, pairs, **options)
    measured = (ours.frame["view"] != "control").to_numpy()
    assert measured.any()
    np.testing.assert_allclose(theirs.frame["value"][measured], ours.frame["value"][measured], rtol=0, atol=1e-4)


def _encoded(model: Model, pair: Pair) -> EncodedPair:
    return tasks.encode(model.tokenizer, pair)
