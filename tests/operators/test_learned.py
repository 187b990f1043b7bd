"""Learned operators: the join of what a Writer compiled, its exact cost, and the two probes that run them by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kvnotes_interp import compat, engine, metrics, operators
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.model import Model
from kvnotes_interp.operators import Blocks, Made, SkillStore, Writer, new_writer
from kvnotes_interp.operators.writer import KINDS
from kvnotes_interp.probes.deviation import reductions as red
from kvnotes_interp.probes.deviation.maps import attention_deviation
from kvnotes_interp.probes.items import items_of
from kvnotes_interp.probes.splicing.quality import cut_down, splice_quality
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import documents
from tests.architectures import EAGER_ONLY, build
from tests.operators.test_compose import BLOCKS, counted
from tests.tiny import tiny, tiny_with_tokenizer
from tests.tiny_tokenizer import train
from tests.writers import merged, stirred, wrapped_cache

WRAP = 3


def learned(model: Model, writer: Writer, blocks: Blocks = BLOCKS, **options: Any) -> Made:
    return operators.OPERATORS[writer.kind](model, blocks, adapter=writer, **options)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt_neox", "glm", "yarn", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_join_is_each_chunk_written_alone_where_it_stands(name: str, kind: Any) -> None:
    """By plain transformers: the adapter merged, the wrappers put around by hand, run at the target positions."""
    model = tiny(name)
    writer = stirred(model, kind, wrapper_tokens=WRAP)
    made = learned(model, writer)
    extra = 0 if kind == "sempic" else 2 * WRAP
    n = BLOCKS.n_context + extra * len(BLOCKS.chunks)
    assert made.cache.positions.tolist() == list(range(n))
    assert (made.cache.end, made.recomputed_tokens, made.layer_tokens) == (n, 0, 0)
    slots = range(n) if made.token_slots is None else made.token_slots
    assert [made.cache.token_ids[0, slot].item() for slot in slots] == list(BLOCKS.context)
    assert (made.token_slots is None) == (kind == "sempic")
    assert made.tokens.token_ids[0].tolist() == list(BLOCKS.context)
    assert made.tokens.positions.tolist() == list(slots)
    plain, start = merged(build(name, attn="eager" if name in EAGER_ONLY else "sdpa"), writer), len(BLOCKS.prefix)
    for chunk in BLOCKS.chunks:
        stop = start + len(chunk) + extra
        for layer, (keys, values) in enumerate(wrapped_cache(plain, writer, chunk, start)):
            torch.testing.assert_close(made.cache.keys[layer][:, :, start:stop], keys, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(made.cache.values[layer][:, :, start:stop], values, atol=1e-9, rtol=1e-7)
        start = stop
    prefix = engine.prefill(model, BLOCKS.prefix)
    assert all(torch.equal(a[:, :, :3], b) for a, b in zip(made.cache.keys, prefix.keys, strict=True)), "the Reader's"


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_a_new_adapter_joins_to_no_recompute(name: str) -> None:
    model = tiny(name)
    made, want = learned(model, new_writer(model, "sempic")), operators.no_recompute(model, BLOCKS)
    assert made == dataclasses.replace(want, cache=made.cache)
    assert made.cache == want.cache
    assert learned(model, stirred(model, "sempic")).cache != want.cache


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_what_the_layers_saw(kind: Any) -> None:
    model = tiny("llama")
    writer = stirred(model, kind, wrapper_tokens=WRAP)
    # The Reader and the Writer's network are two sets of modules, or one.
    networks = [model] if writer.peft is None else [model, dataclasses.replace(model, hf=writer.network(model))]

    def seen_by(call: Any) -> tuple[int, Any]:
        from contextlib import ExitStack

        with ExitStack() as stack:
            seen = [stack.enter_context(counted(network)) for network in networks]
            done = call()
        return sum(map(sum, seen)), done

    total, made = seen_by(lambda: learned(model, writer))
    assert total == made.layer_tokens + made.compiled_layer_tokens
    operator = dataclasses.replace(operators.OPERATORS[kind], options={"adapter": writer})
    total, ready = seen_by(lambda: operator.precompile(model, BLOCKS))
    assert total == ready.layer_tokens == made.compiled_layer_tokens
    wrapped = 0 if kind == "sempic" else 2 * WRAP * len(BLOCKS.chunks)
    assert total == (BLOCKS.n_context + wrapped) * model.shape.n_layers
    total, again = seen_by(lambda: operator(model, BLOCKS, compiled=ready))
    assert (total, again.layer_tokens, again.compiled_layer_tokens) == (0, 0, 0)
    assert again.cache == made.cache


# --- by name -------------------------------------------------------------------------------------------------------


def test_a_name_reads_its_folder_once_until_it_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = tiny("llama"), []
    real = Writer.load
    monkeypatch.setattr(Writer, "load", lambda *a: reads.append(a) or real(*a))
    first = stirred(model, "joint")
    first.save(tmp_path / "best")
    name = f"joint@{tmp_path}"
    for _ in range(3):
        assert operators.find(name)(model, BLOCKS).cache == learned(model, first).cache
    assert len(reads) == 1
    before = operators.adapters({name: operators.find(name), "epic": operators.find("epic")})
    assert list(before) == [name]
    second = stirred(model, "joint", seed=4)
    second.save(tmp_path / "best")
    assert operators.find(name)(model, BLOCKS).cache == learned(model, second).cache
    assert len(reads) == 2
    assert operators.adapters({name: operators.find(name)}) != before


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    stirred(model, "packet").save(tmp_path / "p")
    for kind in KINDS:
        for name in (kind, f"{kind}@"):
            with pytest.raises(InputError, match=rf"needs a trained Writer: {kind}@FOLDER"):
                operators.find(name)
    with pytest.raises(InputError, match="write sempic@FOLDER"):
        operators.OPERATORS["sempic"](model, BLOCKS)
    with pytest.raises(InputError, match=r"is of kind 'packet', not 'sempic': name the operator packet"):
        operators.find(f"sempic@{tmp_path / 'p'}")(model, BLOCKS)
    with pytest.raises(InputError, match=r"there is no writer\.json in"):
        operators.find(f"sempic@{tmp_path / 'q'}")(model, BLOCKS)
    with pytest.raises(InputError, match="belongs to 'tiny-llama#"):
        operators.find(f"packet@{tmp_path / 'p'}")(tiny("qwen2"), BLOCKS)
    other = Blocks(BLOCKS.prefix, (BLOCKS.chunks[0], (21, 23), BLOCKS.chunks[2]), BLOCKS.suffix)
    ready = operators.find(f"packet@{tmp_path / 'p'}").precompile(model, BLOCKS)
    with pytest.raises(InputError, match="compiled part 2 holds other tokens"):
        operators.find(f"packet@{tmp_path / 'p'}")(model, other, compiled=ready)


def test_seams_of_wrapped_chunks_are_not_repaired_wrongly() -> None:
    model = tiny("llama")
    packet, sempic = (
        dataclasses.replace(operators.OPERATORS[kind], options={"adapter": stirred(model, kind)})
        for kind in ("packet", "sempic")
    )
    wrapped, plain = packet.precompile(model, BLOCKS), sempic.precompile(model, BLOCKS)
    for name in ("splice@1", "epic", "cacheblend", "random_recompute"):
        with pytest.raises(InputError, match=r"tokens to recompute in a cache with \d+ wrapper slots"):
            operators.find(name)(model, BLOCKS, compiled=wrapped)
        operators.find(name)(model, BLOCKS, compiled=plain)
    assert operators.find("splice@0")(model, BLOCKS, compiled=wrapped).cache == packet(model, BLOCKS).cache
    with pytest.raises(InputError, match="its seam cannot be repaired"):
        operators.attach(model, wrapped.chunks[0], wrapped.chunks[1], seam_repair=1)


# --- in the probes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions() -> list[documents.Question]:
    return documents.load("biography", n=2, seed=0, documents=2, facts=2)


@pytest.fixture(scope="module")
def qa(questions: list[documents.Question]) -> Model:
    drawn = documents.load("biography", n=40, seed=1, documents=3)
    return tiny_with_tokenizer("llama3", train([q.text + q.answer for q in [*drawn, *questions]], vocab=700), seed=2)


@pytest.fixture(scope="module")
def folders(qa: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of Writers by name: stirred ones of every kind, and an adapter that adds nothing."""
    at = tmp_path_factory.mktemp("writers")
    writers = {kind: stirred(qa, kind, wrapper_tokens=WRAP) for kind in KINDS} | {"new": new_writer(qa, "sempic")}
    return {name: str(writer.save(at / name)) for name, writer in writers.items()}


SPLICE: dict[str, Any] = {"documents": (2,), "max_new_tokens": 2, "progress": False}


def test_splice_quality_runs_them_on_caches_of_their_own(
    qa: Model, questions: list[documents.Question], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*(f"{kind}@{folders[kind]}" for kind in KINDS), f"sempic@{folders['new']}"]
    compiled: list[int] = []
    real = Writer.compile
    monkeypatch.setattr(
        Writer, "compile", lambda self, m, chunks: compiled.append(len(chunks)) or real(self, m, chunks)
    )
    result = splice_quality(qa, questions, operators=names, timing=2, **SPLICE)
    frame = result.frame
    cells = frame.set_index(["pair", "site", "readout"])["value"]
    fitting = cut_down(questions, (2,))[0]
    assert len(compiled) == len(fitting) * len(names) * 2, "every chunk once per Writer, and never while timed"
    for question in fitting:
        blocks = items_of(qa, [question])[0][0].blocks
        full = engine.decide(qa, engine.prefill(qa, blocks.context), blocks.suffix)[0]
        for name in names:
            made = operators.find(name)(qa, blocks)
            logits = engine.decide(qa, made.cache, blocks.suffix)[0]
            kl = float(metrics.kl_divergence(full, logits))
            assert cells[question.key, name, "kl"] == pytest.approx(kl, rel=1e-6)
            assert cells[question.key, name, "layer_tokens"] == 0
            assert cells[question.key, name, "seconds"] > 0
        one, other = (cells.sort_index()[question.key, site] for site in (names[-1], "no_recompute"))
        same = [r for r in one.index if r not in ("seconds", "speedup")]
        assert (one[same] == other[same]).all(), "an adapter that adds nothing"
        assert cells[question.key, names[0], "kl"] != cells[question.key, "no_recompute", "kl"]
    assert set(frame.loc[frame["site"] == names[1], "operator"]) == {names[1]}, "a folder is no point of a curve"
    assert {"all_repaired", "own_place", "unmoved_keys_differ"} <= set(frame.loc[frame["view"] == "control", "site"])
    assert set(result.manifest["request"]["options"]["adapters"]) == set(names)
    curves = [trace.name for trace in result.plot("splice_documents").data if trace.name]
    for kind, name in (("SemPIC", "sempic"), ("SemPIC", "new"), ("KV Packet", "packet")):
        assert f"{kind} ({folders[name]})" in curves
    for figure in result.plots():
        result.plot(figure)


def test_a_run_does_not_go_on_with_another_writer(
    qa: Model, questions: list[documents.Question], tmp_path: Path
) -> None:
    stirred(qa, "packet").save(tmp_path / "w")
    options: dict[str, Any] = {
        **SPLICE,
        "operators": [f"packet@{tmp_path / 'w'}"],
        "timing": 0,
        "out": tmp_path / "run",
    }
    splice_quality(qa, questions, **options)
    splice_quality(qa, questions, **options, resume=True)
    stirred(qa, "packet", seed=9).save(tmp_path / "w")
    with pytest.raises(InputError, match=r"asked for something else: request\.options\.adapters\.packet@"):
        splice_quality(qa, questions, **options, resume=True)


@pytest.fixture(scope="module")
def maps(qa: Model, questions: list[documents.Question], folders: dict[str, str]) -> Result:
    names = (f"packet@{folders['packet']}", "no_recompute", f"sempic@{folders['new']}", f"joint@{folders['joint']}")
    return attention_deviation(qa, questions, operators=names, bins=4, max_new_tokens=2, progress=False)


def test_deviation_of_a_packet_is_that_of_its_tokens(
    qa: Model, questions: list[documents.Question], folders: dict[str, str], maps: Result
) -> None:
    """Recounted from `engine.attention_rows` on the wrapped cache: wrappers in no chunk, tokens at full's slots."""
    name = f"packet@{folders['packet']}"
    cells = maps.frame[maps.frame["site"] == name]
    for question in questions:
        item = items_of(qa, [question])[0][0]
        blocks = item.blocks
        cache = operators.find(name)(qa, blocks).cache
        rows = engine.attention_rows(qa, cache, blocks.suffix)
        full = engine.attention_rows(qa, engine.prefill(qa, blocks.context), blocks.suffix)
        spans = []
        for i, (start, stop) in enumerate(blocks.spans):
            moved = start + WRAP * (2 * i + 1)
            spans.append(((start, stop), (moved, moved + stop - start)))
        profiles = [
            (rows[..., slice(*mine)].double() - full[..., slice(*theirs)].double()).abs().mean(dim=(1, 2))
            for theirs, mine in spans
        ]
        got = cells[(cells["pair"] == question.key) & (cells["view"] == "region") & (cells["edge"] == 0.1)]
        got = got[got["readout"] == "deviation_raw"].set_index("region")["value"]
        weights = [red.region_weights(p.shape[-1], 0.1, "overlap") for p in profiles]
        want = torch.stack([red.averaged(p, w).mean(0) for p, w in zip(profiles, weights, strict=True)]).mean(0)
        for region, value in zip(red.REGIONS, want.tolist(), strict=True):
            assert got[region] == pytest.approx(value, rel=1e-6)
        mass = torch.stack([rows[..., slice(*mine)].sum(-1).mean((1, 2)) for _, mine in spans]).mean(0)
        there = cells[(cells["pair"] == question.key) & (cells["readout"] == "mass")].set_index("layer")["value"]
        torch.testing.assert_close(torch.tensor(there.sort_index().tolist()), mass.float(), atol=1e-6, rtol=0)


def test_a_shift_by_wrappers_is_no_difference_of_keys(qa: Model, maps: Result, folders: dict[str, str]) -> None:
    """In the first layer a key depends on its own token alone: between wrappers it is the key of full recompute."""
    frame = maps.frame[(maps.frame["view"] == "kv") & (maps.frame["readout"] == "angle")]
    angles = frame[frame["site"] == f"packet@{folders['packet']}"].groupby(["part", "layer"])["value"].max()
    assert angles["k", 0] < 1e-6
    assert angles["v", 0] < 1e-6
    assert angles["k", 1] > 1e-2


def test_a_new_adapter_deviates_as_no_recompute(maps: Result, folders: dict[str, str]) -> None:
    frame = maps.frame[~maps.frame["view"].isin(("control",))].drop(columns=["ranking"])
    one, other = (
        frame[frame["site"] == site].drop(columns=["site"]).reset_index(drop=True)
        for site in (f"sempic@{folders['new']}", "no_recompute")
    )
    assert one.equals(other)
    assert len(one) > 100
    assert (maps.frame.loc[maps.frame["view"] == "control", "value"].notna()).all()


def test_extra_slots_without_a_map_are_refused(
    qa: Model, questions: list[documents.Question], folders: dict[str, str]
) -> None:
    operator = operators.find(f"packet@{folders['packet']}")
    blind = lambda model, blocks: dataclasses.replace(operator(model, blocks), token_slots=None)  # noqa: E731
    with pytest.raises(InputError, match="one slot per token, in order"):
        attention_deviation(qa, questions, operators=[("blind", blind)], progress=False)


# --- skills --------------------------------------------------------------------------------------------------------


def test_a_store_keeps_what_each_writer_compiled_apart(qa: Model, folders: dict[str, str], tmp_path: Path) -> None:
    text, prefix, suffix = "The light is red, so we stop.\n", "You are a helpful assistant.\n", "Is the light red?"
    writers = {name: Writer.load(folder, qa) for name, folder in folders.items()}
    stores = {name: SkillStore(tmp_path, qa, writer=writer) for name, writer in writers.items()}
    stores["plain"] = SkillStore(tmp_path, qa)
    assert len({store.path(text) for store in stores.values()}) == len(stores)
    ids = qa.tokenizer(text, add_special_tokens=False)["input_ids"]
    for name, store in stores.items():
        skill = store.get(text)
        assert skill.cache == SkillStore(tmp_path, qa, writer=store.writer).get(text).cache, "read back"
        assert list(skill.token_ids) == ids
        assert skill.writer == (store.writer.fingerprint if store.writer else "")
        done = operators.splice_skills(qa, prefix, [skill, skill], suffix)
        if store.writer is None:
            want: KVCache = operators.no_recompute(qa, done.blocks).cache
        else:
            want = learned(qa, store.writer, done.blocks).cache
        assert done.made.cache == want, name
        assert compat.text_config(qa.hf).num_hidden_layers == skill.cache.n_layers
