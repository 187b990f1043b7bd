"""Probes on caches that operators made: identities with one prefill, what a chunk alone cannot hold, wrapper slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import dryrun, engine, operators, probes, tasks
from kvnotes_interp.cache import KVCache
from kvnotes_interp.cli import options as cli_options
from kvnotes_interp.errors import ControlError, InputError
from kvnotes_interp.metrics import Competence
from kvnotes_interp.model import Model
from kvnotes_interp.operators.blocks import Blocks, Cut, cut_pair, decision_start
from kvnotes_interp.operators.made import Compiled, Made
from kvnotes_interp.probes.linear.features import STATES, record
from kvnotes_interp.probes.making import TAILS, Making, laid_out
from kvnotes_interp.probes.measure import Case, Sweeper, downstream_of, field_of, identity_controls, open_case
from kvnotes_interp.probes.patching import cells_of
from kvnotes_interp.results import Result
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair, Pair, Piece
from tests.probes.conftest import LENIENT
from tests.tiny import tiny_with_tokenizer
from tests.tiny_tokenizer import train

ALONE = Making("no_recompute", "documents", "suffix")


def opened(model: Model, pair: EncodedPair, making: Making) -> Case:
    return open_case(model, making.aligned(pair), competence=Competence(0.0, 0.0), sweeper=Sweeper(), making=making)


def text_pair(old: str, new: str, *, joined: bool) -> Pair:
    """Field and rule in one document, or the field as the last token of its own, with a document on either side."""

    def prompt(value: str) -> tuple[Piece, ...]:
        return (
            Piece("Here are some notes.\n", "preamble", "intro"),
            Piece("The order was sent. ", "filler", "first", 0),
            Piece("The light is", "context", "before", 1),
            Piece(value, "field", "field", 1),
            Piece(" in the place.\n", "rule", "rule", 1 if joined else 2),
            Piece("Paul lives in Rome.\n", "filler", "last", 3),
            Piece("The answer is", "decision", "question"),
        )

    return Pair(
        "hand", "verbatim", f"hand.{old}.{new}.{joined}".replace(" ", ""), old, "train", prompt(old), prompt(new),
        " yes", " no", False,
    )  # fmt: skip


@lru_cache(maxsize=16)
def small(name: str) -> tuple[Model, EncodedPair, EncodedPair]:
    """A float64 model, and the pair cut both ways."""
    pairs = [text_pair(" red", " green", joined=joined) for joined in (True, False)]
    tokenizer = train([pairs[0].text_old + " yes no", pairs[0].text_new] * 20, vocab=600)
    model = tiny_with_tokenizer(name, tokenizer, seed=1)
    joined, apart = tasks.encode_all(model.tokenizer, pairs)[0]
    return model, joined, apart


# --- one prefill and full recompute ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_neox", "cohere2", "mistral", "nanochat"])
def test_full_recompute_is_the_prefill(name: str, tail: str) -> None:
    model, pair, _ = small(name)
    plain, made = (
        opened(model, pair, Making(tail=tail)),
        opened(model, pair, Making("full_recompute", "documents", tail)),
    )
    assert made.pair == plain.pair
    assert (
        made.tail == plain.tail == list(pair.old_ids[-1:] if tail == "last" else pair.old_ids[decision_start(pair) :])
    )
    for mine, theirs in ((made.base, plain.base), (made.donor, plain.donor)):
        assert torch.equal(mine.token_ids, theirs.token_ids)
        for a, b in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    assert (made.old, made.new) == pytest.approx((plain.old, plain.new), abs=1e-10)
    sites = [Site(field_of(pair)), *(Site((slot,), part=part) for slot in downstream_of(plain.pair) for part in "kv")]
    np.testing.assert_allclose(made.scores(sites), plain.scores(sites), atol=1e-10)
    identity_controls(made)


def values(result: Result) -> pd.DataFrame:
    return result.frame[result.frame["view"] != "control"]


def test_a_whole_run_by_full_recompute_has_the_numbers_of_one_by_prefill(model: Model, pairs: list[Pair]) -> None:
    for probe, own in (
        (probes.local_patching, {"map_pairs": 2, "draws": 2}),
        (probes.suffix_concentration, {"draws": 1}),
    ):
        plain = probe(model, pairs[:10], **own, **LENIENT)
        made = probe(model, pairs[:10], operator="full_recompute", **own, **LENIENT)
        assert values(made).drop(columns="value").equals(values(plain).drop(columns="value"))
        np.testing.assert_allclose(values(made)["value"], values(plain)["value"], atol=1e-8)  # shares of small gaps
        assert len(values(made)) > 50
        assert made.summary().title.endswith("caches by full_recompute, language")
        assert made.manifest["request"]["options"]["operator"] == "full_recompute"
        assert "operator" not in plain.manifest["request"]["options"]


# --- chunks compiled alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_a_chunk_compiled_alone_holds_no_note_of_another(name: str) -> None:
    model, joined, apart = small(name)
    case = opened(model, apart, ALONE)
    field, downstream = field_of(case.pair), downstream_of(case.pair)
    assert abs(case.new - case.old) > 1e-6
    assert case.scores([Site(downstream), Site(field)]) == pytest.approx([case.old, case.new], abs=1e-12)
    assert [slot for slot in range(len(case.base)) if differs(case, slot)] == list(field)
    # Control: in full recompute, and where the chunk holds more than the field, what follows it differs.
    for pair, making in ((apart, dataclasses.replace(ALONE, operator="full_recompute")), (joined, ALONE)):
        other = opened(model, pair, making)
        assert abs(other.scores([Site(downstream)])[0] - other.old) > 1e-6
    # Run on the field as the suffix is, decision tokens do hold it, unless they are part of the tail.
    last = opened(model, apart, dataclasses.replace(ALONE, tail="last"))
    assert abs(last.scores([Site(downstream_of(last.pair))])[0] - last.old) > 1e-6


def test_the_run_says_what_recovers() -> None:
    model, *_ = small("llama")
    pairs = [text_pair(a, b, joined=False) for a, b in ((" red", " green"), (" green", " red"))]
    result = probes.local_patching(
        model, pairs, operator="no_recompute", blocks="documents", tail="suffix", views=("region",), **LENIENT
    )
    rows = result.summary().rows.set_index("quantity")["mean"]
    assert result.summary().counts["n_competent"] >= 1
    assert rows["field_only"] == pytest.approx(1, abs=1e-9)
    assert rows["downstream_only"] == pytest.approx(0, abs=1e-9)
    assert rows["region_field"] == pytest.approx(1, abs=1e-9)
    assert rows[["region_filler", "region_rule"]].abs().max() < 1e-9
    line = result.pairs.iloc[0]
    assert line["length"] == line["regions"].index("decision") + 1  # what the caches hold, and one token on top
    assert sorted(set(line["documents"])) == [-1, 0, 1, 2, 3]


@lru_cache(maxsize=2)
def organism(name: str) -> Model:
    return kv.load(f"organism:{name}", device="cpu", dtype="float64")


def test_the_organism_that_takes_notes_takes_them_inside_the_document() -> None:
    model = organism("notes")
    for pair in tasks.encode_all(model.tokenizer, tasks.load("signal", n=6, seed=3))[0]:
        full, whole, cut = (
            opened(model, pair, Making(name, blocks, "suffix"))
            for name, blocks in (
                ("full_recompute", "documents"), ("no_recompute", "documents"), ("no_recompute", "sentences")
            )
        )  # fmt: skip
        stops = [slot for slot in downstream_of(full.pair) if pair.tokens_old[slot] == "."]
        for case in (full, whole):
            assert case.scores([Site(field_of(pair)), Site(tuple(stops))]) == pytest.approx([case.old, case.new])
            held = [slot for slot in downstream_of(case.pair) if differs(case, slot)]
            assert held == stops
        # Cut at sentences, only the full stop of the field's own sentence can hold it.
        assert [slot for slot in downstream_of(cut.pair) if differs(cut, slot)] == stops[:1]


def differs(case: Case, slot: int) -> bool:
    both = zip((*case.base.keys, *case.base.values), (*case.donor.keys, *case.donor.values), strict=True)
    return any(not torch.equal(a[:, :, slot], b[:, :, slot]) for a, b in both)


# --- slots that hold no token ----------------------------------------------------------------------------------------

HEADER, TRAILER = (3,), (3, 4)


@dataclasses.dataclass(frozen=True)
class Fake(operators.Operator):
    """An operator that is a function of a test."""

    made_by: Callable[..., Made] | None = None

    @property
    def _implementation(self) -> Any:
        return self.made_by


def wrapped(model: Model, chunk: tuple[int, ...]) -> KVCache:
    cache = engine.prefill(model, (*HEADER, *chunk, *TRAILER))
    ids = cache.token_ids.clone()
    ids[:, : len(HEADER)] = -1
    ids[:, -len(TRAILER) :] = -1
    return dataclasses.replace(cache, token_ids=ids)


def packet(model: Model, blocks: Blocks) -> Made:
    """Chunks between wrapper slots."""
    prefix = engine.prefill(model, blocks.prefix) if blocks.prefix else None
    compiled = Compiled(prefix, tuple(wrapped(model, chunk) for chunk in blocks.chunks))
    return operators.no_recompute(model, blocks, compiled=compiled)


def only_wrappers(model: Model, blocks: Blocks) -> Made:
    """The same, but the tokens' own slots are of a text that is the same for all: only wrappers hold what was read."""
    real = packet(model, blocks)
    same = packet(model, Blocks(blocks.prefix, tuple((5,) * len(chunk) for chunk in blocks.chunks), blocks.suffix))
    assert real.token_slots is not None
    return dataclasses.replace(real, cache=real.cache.patched(Site(real.token_slots), same.cache))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (packet, only_wrappers):
        name = function.__name__
        monkeypatch.setitem(operators.OPERATORS, name, Fake(name, "", "", "a test's", made_by=function))


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("tail", TAILS)
def test_sites_are_where_the_tokens_are(tail: str) -> None:
    model, pair, _ = small("llama")
    case = opened(model, pair, Making("packet", "documents", tail))
    laid, blocks = case.pair, cut_pair(pair, blocks="documents")
    n_wrappers = len(blocks.chunks) * (len(HEADER) + len(TRAILER))
    assert laid.length == pair.length + n_wrappers
    assert laid.length - laid.tail == len(case.base)
    assert list(case.base.token_ids[0]) == list(laid.old_ids[: len(case.base)])
    assert list(case.donor.token_ids[0]) == list(laid.new_ids[: len(case.base)])
    assert [laid.tokens_old[slot] for slot in case.slots] == list(pair.tokens_old)
    assert [laid.anchors[slot] for slot in case.slots] == list(pair.anchors)
    assert [laid.documents[slot] for slot in case.slots] == list(pair.documents)
    assert laid.tokens_new[slice(*laid.field)] == pair.tokens_new[slice(*pair.field)]
    assert laid.regions.count("wrapper") == n_wrappers
    assert len(set(laid.anchors)) == laid.length
    # A patch of one token is that of a cache patched by hand where its key was put.
    for token in (pair.field[0], pair.field[1], pair.field[1] + 3):
        slot = len(blocks.prefix) + token - len(blocks.prefix)
        for (start, stop), number in zip(blocks.spans, range(9), strict=False):
            if start <= token < stop:
                slot = token + number * (len(HEADER) + len(TRAILER)) + len(HEADER)
        assert case.slots[token] == slot
        by_hand = engine.decide(model, case.base.patched(Site((slot,)), case.donor), case.tail, case.answers)[0]
        assert case.scores([Site((case.slots[token],))])[0] == pytest.approx(float(by_hand[1] - by_hand[0]), abs=1e-10)
    identity_controls(case)


@pytest.mark.usefixtures("fakes")
def test_what_only_the_wrappers_hold_is_found_in_the_wrappers() -> None:
    model, pair, _ = small("llama")

    def shares(operator: str) -> tuple[EncodedPair, list[tuple[dict[str, Any], Site, float]]]:
        case = opened(model, pair, Making(operator, "documents", "suffix"))
        cells = list(cells_of(case.pair, model.shape.n_layers, views=("position", "region")))
        scores = case.scores([site for _, site in cells])
        assert abs(case.new - case.old) > 1e-6
        return case.pair, [
            (a, s, (x - case.old) / (case.new - case.old)) for (a, s), x in zip(cells, scores, strict=True)
        ]

    laid, rows = shares("only_wrappers")
    found = {about["site"]: share for about, site, share in rows if site.part == "kv"}
    assert found["wrapper"] == pytest.approx(1, abs=1e-8)
    assert found["downstream_only"] == pytest.approx(1, abs=1e-8)  # the trailer stands behind the field
    assert max(abs(found[name]) for name in ("field_only", "field", "rule", "filler", "delimiter")) < 1e-8
    loud = {site.positions[0] for about, site, share in rows if about["view"] == "position" and abs(share) > 1e-8}
    end = max(slot for slot, document in enumerate(laid.documents) if document == laid.documents[laid.field[0]])
    assert loud == {end + 1, end + 2}  # the trailer of the field's own document
    assert {laid.tokens_old[slot] for slot in loud} == {"[wrapper]"}
    # Control: where the tokens hold it too, the wrappers are not all.
    _, others = shares("packet")
    assert abs(next(share for about, _, share in others if about["site"] == "field_only")) > 1e-3


def test_a_field_torn_apart_is_refused() -> None:
    _, pair, _ = small("llama")
    two = dataclasses.replace(pair, field=(pair.field[0], pair.field[0] + 2))
    slots = [slot + (slot > pair.field[0]) for slot in range(pair.length)]
    with pytest.raises(InputError, match="inside the field"):
        laid_out(two, slots)
    assert laid_out(pair, range(pair.length)) is pair


# --- linear probes ---------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"folds": 3, "draws": 1, "direction_pairs": 2, "direction_layers": 2, "progress": False}
PLACES = ["field", "aggregator", "decision"]


def accuracies(result: Result) -> pd.DataFrame:
    frame = result.frame
    rows = frame[(frame["readout"] == "accuracy") & (frame["classifier"] == "logistic")]
    return rows.pivot_table(index=["part", "site"], columns="layer", values="value", aggfunc="mean")


def test_linear_probes_read_what_the_operator_made() -> None:
    result = probes.linear_decodability(
        organism("mixed"),
        tasks.load("signal", n=9, seed=3),
        operator="no_recompute",
        features=("values", "residual"),
        positions=PLACES,
        **SMALL,
    )
    read = accuracies(result)
    # The last full stop stands in another sentence than the field: compiled alone it can hold nothing of it.
    assert (read.loc[("values", "aggregator")].dropna() == 0.5).all()
    assert read.loc[("values", "field")].max() > 0.7
    # A residual stream there is only of what is run on top of the caches, and pushes go nowhere else.
    assert set(read.loc["residual"].index) == {"decision"}
    assert read.loc[("residual", "decision")].max() > 0.7
    assert set(result.frame.loc[result.frame["view"] == "direction", "site"]) == {"decision"}
    assert "caches by no_recompute" in result.summary().title


def test_no_residual_stream_without_a_pass() -> None:
    with pytest.raises(InputError, match="no position is run on top"):
        probes.linear_decodability(
            organism("mixed"), tasks.load("signal", n=4), operator="no_recompute", positions=["field"], **SMALL
        )


@pytest.mark.parametrize("tail", TAILS)
def test_features_by_full_recompute_are_those_of_a_clean_run(tail: str) -> None:
    model, pair, _ = small("qwen3")
    decision, slots = pair.length - 1, [pair.field[0], pair.field[1] + 3, pair.length - 1]
    plain, made = (
        record(
            opened(model, pair, making), slots, live=[decision], features=("keys", "values", "residual"),
            layers=(0, 1, 2), states=STATES,
        )
        for making in (Making(tail=tail), Making("full_recompute", tail=tail))
    )  # fmt: skip
    assert set(made) == set(plain)
    for name, want in plain.items():
        torch.testing.assert_close(made[name], want, atol=1e-9, rtol=1e-9)


@pytest.mark.usefixtures("fakes")
def test_features_are_those_of_the_slot() -> None:
    model, pair, _ = small("llama")
    case = opened(model, pair, Making("packet", "documents", "suffix"))
    tokens = [pair.field[0], pair.field[1] + 3, pair.length - 1]
    slots = [case.slots[token] for token in tokens]
    got = record(case, slots, live=slots[-1:], features=("values", "residual"), layers=(0, 1), states={})
    whole = engine.extend(model, case.donor, case.tail)[0]
    for place, slot in enumerate(slots):
        torch.testing.assert_close(got["values"][place, 1, 1], whole.values[1][0, :, slot].flatten())
    assert got["residual"].shape[:3] == (1, 2, 2)
    embedding = model.hf.get_input_embeddings()(torch.tensor([pair.old_ids[-1]]))[0]
    torch.testing.assert_close(got["residual"][0, 0, 0], embedding.detach())


# --- options ---------------------------------------------------------------------------------------------------------


def test_wrong_choices_are_named(model: Model, pairs: list[Pair]) -> None:
    faults: tuple[tuple[dict[str, Any], str], ...] = (
        ({"operator": "no_recomput"}, 'Did you mean "no_recompute"'),
        ({"operator": "sempic"}, "sempic@FOLDER"),
        ({"operator": "no_recompute", "blocks": "lines"}, "sentences, documents"),
        ({"blocks": "documents"}, "operator="),
        ({"tail": "all"}, "last, suffix"),
    )
    for own, match in faults:
        with pytest.raises(InputError, match=match):
            probes.local_patching(model, pairs, **own)
    assert get_args(Cut) == cli_options.BLOCKS
    assert cli_options.TAILS == TAILS


def test_an_operator_that_chooses_by_the_text_is_refused() -> None:
    model, _, apart = small("llama")
    case = opened(model, apart, Making("random_recompute@0.5", "documents"))
    with pytest.raises(
        ControlError, match=r"'before_field' .* random_recompute@0.5 makes other slots before the field"
    ):
        identity_controls(case)


def test_the_operator_is_part_of_the_request(model: Model, pairs: list[Pair], tmp_path: Path) -> None:
    own = {**LENIENT, "views": (), "out": tmp_path / "run"}
    first = probes.local_patching(model, pairs[:6], operator="no_recompute", **own)
    options = first.manifest["request"]["options"]
    assert (options["operator"], options["blocks"], options["tail"]) == ("no_recompute", "sentences", "last")
    again = probes.local_patching(model, pairs[:6], operator="no_recompute", resume=True, **own)
    assert again.frame.equals(first.frame)
    others: tuple[dict[str, Any], ...] = ({"operator": "splice@1"}, {}, {"operator": "no_recompute", "tail": "suffix"})
    for other in others:
        with pytest.raises(InputError, match="options"):
            probes.local_patching(model, pairs[:6], resume=True, **other, **own)


def test_a_dry_run_counts_without_the_suffix(tiny_folder: Path) -> None:
    loaded, few = kv.load(tiny_folder), kv.tasks.pronoun(n=4, seed=2)
    own = {"parts": ("kv",), "views": ("position",), "draws": 1, "map_pairs": 0, "operator": "no_recompute"}
    counts = [dryrun.plan("local_patching", {**own, "tail": tail}, str(tiny_folder), few).cells for tail in TAILS]
    encoded = tasks.encode_all(loaded.tokenizer, few)[0]
    assert counts[0] - counts[1] == sum(p.length - 1 - decision_start(p) for p in encoded) > 0


def test_kvprobe_patches_what_an_operator_made(tiny_folder: Path, kvprobe: Callable[..., Any]) -> None:
    done = kvprobe(
        "patch", "--model", tiny_folder, "--n", 4, "--views", "none", "--min-gap", 0, "--min-gap-noise", 0, "--json",
        "--operator", "splice@2", "--tail", "suffix",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "caches by splice@2, whole suffix run on top" in done.out
    assert kvprobe("linear", "--operator", "nope").code == 2
