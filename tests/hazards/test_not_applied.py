"""Every way to interfere with a pass, on every architecture: it took place, or it is refused by name.

The references are the models' own eager attention under explicit masks and hooks on their own modules; none of them
knows this package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import kvnotes_interp as kv
from kvnotes_interp import attention, compat, engine
from kvnotes_interp.engine import Cut, Edits, HeadPatch, ResidualPatch, WritePatch
from tests.architectures import CONFIGS, EAGER_ONLY, build, initialise
from tests.reference import answer_with_cache, full_cache, full_logits, patched
from tests.tiny import tiny
from tests.tiny_tokenizer import tiny_tokenizer

IDS = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
CUT, LAST = 9, len(IDS) - 1
EXACT = {"rtol": 0, "atol": 1e-9}
ROUNDED = {"rtol": 0, "atol": 1e-6}  # eager attention takes its softmax in float32 in some families


def odd(kind: str) -> Any:
    """A family that does something of its own: see ODD."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {
        "falcon": {"alibi": False, "multi_query": False, "num_kv_heads": 2, "new_decoder_architecture": True},
        "gpt_neox_japanese": {"intermediate_multiple_size": 2},
        "doge": {"num_key_value_heads": 2, "intermediate_size": 48, "keep_window_size": 64},
        "jetmoe": {
            "kv_channels": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "hyperclovax": {
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "use_post_norm": True,
            "residual_multiplier": 0.7,
        },
    }[kind]
    config = AutoConfig.for_model(kind, **sizes, **more, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    attn = "sdpa" if kind == "falcon" else "eager"
    hf = AutoModelForCausalLM.from_config(config, attn_implementation=attn, experts_implementation="eager")
    initialise(hf, 0)
    return hf.double().eval()


# Falcon and GPT-NeoX-Japanese run attention of their own. Doge adds to the mask, and scales what it reads by a learned
# vector. JetMoE attends to more key heads than it caches. HyperCLOVA X norms what it writes, under names of its own.
ODD = ("falcon", "gpt_neox_japanese", "doge", "jetmoe", "hyperclovax")
OWN_ATTENTION = ODD[:2]


@lru_cache
def model_of(name: str) -> kv.Model:
    return kv.load(odd(name)) if name in ODD else tiny(name)


@lru_cache
def eager(name: str) -> Any:
    """The same weights under the model's own eager attention."""
    if name in ODD:
        return odd(name)
    return build(name, attn="eager")


def masked_logits(name: str, forbidden: Tensor) -> Tensor:
    """Logits of the last token of the model's own eager forward, `[query key]` True where it may not look."""
    hf = eager(name)
    n = len(IDS)
    window = getattr(compat.text_config(hf), "sliding_window", None)
    kinds = getattr(compat.text_config(hf), "layer_types", None)
    causal = ~torch.ones(n, n).tril().bool()
    places = torch.arange(n)
    outside = torch.zeros(n, n, dtype=torch.bool) if window is None else places[:, None] - places >= window

    def mask(kind: str) -> Tensor:
        out = causal | forbidden | (outside if kind == "sliding_attention" else False)
        return torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(out, torch.finfo(torch.float64).min)

    handles = []
    for index, layer in enumerate(compat.layers(hf)):
        kind = kinds[index] if kinds else ("sliding_attention" if window is not None else "full_attention")

        def put(_m: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str = kind) -> Any:
            return args, {**kwargs, "attention_mask": mask(kind)}

        handles.append(layer.register_forward_pre_hook(put, with_kwargs=True))
    try:
        return full_logits(hf, torch.tensor([IDS]))[0, -1]
    finally:
        for handle in handles:
            handle.remove()


def forbid(keys: tuple[int, ...], queries: tuple[int, ...]) -> Tensor:
    out = torch.zeros(len(IDS), len(IDS), dtype=torch.bool)
    out[torch.tensor(queries)[:, None], torch.tensor(keys)] = True
    return out


def refused(name: str, error: pytest.ExceptionInfo[kv.UnsupportedError]) -> None:
    text = str(error.value)
    assert type(model_of(name).hf).__name__[:4] in text or name in text.lower(), text
    assert "refused" in text, text


# Ways to interfere: (what it gives, what plain transformers gives, what it is without). A refusal is checked by name.


def a_cut(name: str) -> tuple[Tensor, Tensor]:
    head = engine.prefill(model_of(name), IDS[:CUT])
    cuts = [Cut(keys=(CUT, CUT + 1), queries=(LAST,)), Cut(keys=(CUT + 2,), queries=(LAST - 1, LAST))]
    got = engine.capture(model_of(name), head, IDS[CUT:], edits=Edits(cuts=cuts))
    forbidden = forbid((CUT, CUT + 1), (LAST,)) | forbid((CUT + 2,), (LAST - 1, LAST))
    return compat.unembed(model_of(name).hf, got.hidden[0, -1]), masked_logits(name, forbidden)


def a_key_bias(name: str) -> tuple[Tensor, Tensor]:
    model = model_of(name)
    head = engine.prefill(model, IDS[:LAST])
    hidden = (torch.arange(LAST) == LAST - 2) | (torch.arange(LAST) == LAST - 1)
    bias = tuple((hidden * -1e9).to(k.dtype).expand(k.shape[:3]) for k in head.keys)
    got = engine.decide(model, dataclasses.replace(head, bias=bias), IDS[LAST:])[0]
    return got, masked_logits(name, forbid((LAST - 2, LAST - 1), (LAST,)))


def a_compact_cache(name: str) -> tuple[Tensor, Tensor]:
    model = model_of(name)
    whole = kv.CompactCache.of(engine.prefill(model, IDS[:LAST]))
    kept = torch.tensor([s for s in range(LAST) if s != LAST - 2]).expand(whole.n_kv_heads, -1)
    got = engine.decide(model, whole.kept([kept] * whole.n_layers), IDS[LAST:])[0]
    return got, masked_logits(name, forbid((LAST - 2,), (LAST,)))


def a_recompute(name: str) -> tuple[Tensor, Tensor]:
    """All slots behind the first two, of a cache whose keys there were spoiled: the plain prefill comes back."""
    model = model_of(name)
    whole = engine.prefill(model, IDS[:LAST])
    spoiled = dataclasses.replace(whole, keys=tuple(k + (torch.arange(LAST) > 1)[:, None] for k in whole.keys))
    mended = engine.recompute(model, spoiled, range(2, LAST)).cache
    return engine.decide(model, mended, IDS[LAST:])[0], full_logits(eager(name), torch.tensor([IDS]))[0, -1]


def a_patch(name: str) -> tuple[Tensor, Tensor]:
    """Of a cache, by the sweep's own path; the reference copies cell by cell."""
    model, site = model_of(name), kv.Site(positions=(2, 4, 5), layers=(0, 1), part="kv")
    other = [*IDS[:2], 90, *IDS[3:4], 11, 17, *IDS[6:CUT]]
    base, donor = engine.prefill(model, IDS[:CUT]), engine.prefill(model, other)
    got = engine.sweep(model, base, donor, [site], IDS[CUT:], tuple(range(97))).scores[0]
    hf = eager(name)
    kvs = [full_cache(hf, torch.tensor([ids])) for ids in (IDS[:CUT], other)]
    want = answer_with_cache(
        hf,
        patched(kvs[0], kvs[1], layers=site.layers, positions=site.positions, part="kv"),
        torch.tensor([IDS[CUT:]]),
        torch.arange(CUT, len(IDS)),
    )[0, -1]
    return got, want


def heads_to_zero(name: str) -> tuple[Tensor, Tensor]:
    model, layer = model_of(name), 1
    heads = torch.zeros(1, 1, model.shape.n_heads, dtype=torch.bool)
    heads[..., 2] = True
    nothing = torch.zeros(1, 1, model.shape.n_heads, model.shape.d_head)
    edits = Edits(heads=HeadPatch((LAST,), {layer: nothing}, {layer: heads}))
    got = engine.capture(model, None, IDS, edits=edits)
    hf = eager(name)

    def zero(_m: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        out = args[0].unflatten(-1, (model.shape.n_heads, -1)).clone()
        out[:, LAST, 2] = 0
        return (out.flatten(-2),)

    handle = compat.output_projection(compat.layers(hf)[layer]).register_forward_pre_hook(zero)
    want = full_logits(hf, torch.tensor([IDS]))[0, -1]
    handle.remove()
    return compat.unembed(model.hf, got.hidden[0, -1]), want


def a_vector_added(name: str) -> tuple[Tensor, Tensor]:
    """Where layer 1 reads, and where the final norm reads (which NanoChat also uses on its embeddings)."""
    model = model_of(name)
    vector = torch.linspace(-1, 1, model.shape.d_model, dtype=torch.float64)[None, None]
    layers = {1: vector, model.shape.n_layers: 0.5 * vector}
    got = engine.capture(model, None, IDS, edits=Edits(residual=ResidualPatch((LAST,), layers)))
    hf = eager(name)

    def added(by: Tensor) -> Callable[..., Any]:
        def hook(_m: Any, _args: Any, output: Any) -> Any:
            hidden = (output[0] if isinstance(output, tuple) else output).clone()
            hidden[:, LAST] += by[0, 0]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook

    behind = compat.layers(hf)
    handles = [
        behind[0].register_forward_hook(added(vector)),
        behind[-1].register_forward_hook(added(0.5 * vector)),
    ]
    want = full_logits(hf, torch.tensor([IDS]))[0, -1]
    for handle in handles:
        handle.remove()
    return compat.unembed(model.hf, got.hidden[0, -1]), want


def an_mlp_write(name: str) -> tuple[Tensor, Tensor]:
    """The MLP of layer 1 adds nothing at the last slot."""
    model = model_of(name)
    nothing = torch.zeros(1, 1, model.shape.d_model)
    edits = Edits(writes=[WritePatch("mlp", (LAST,), {1: nothing})])
    got = engine.capture(model, None, IDS, edits=edits)
    hf = eager(name)
    layer = compat.layers(hf)[1]
    names = ("post_feedforward_layernorm", "post_mlp_layernorm", "mlp", "feed_forward")
    write = next(m for n in names if (m := getattr(layer, n, None)) is not None)

    def none(_m: Any, _args: Any, output: Any) -> Any:
        first = (output[0] if isinstance(output, tuple) else output).clone()
        first.view(len(IDS), -1)[LAST] = 0
        return (first, *output[1:]) if isinstance(output, tuple) else first

    handle = write.register_forward_hook(none)
    want = full_logits(hf, torch.tensor([IDS]))[0, -1]
    handle.remove()
    return compat.unembed(model.hf, got.hidden[0, -1]), want


WAYS = (a_cut, a_key_bias, a_compact_cache, a_recompute, a_patch, heads_to_zero, a_vector_added, an_mlp_write)
# What is refused by name, and nothing else may be: (way, architecture).
REFUSED = {(way.__name__, name) for way in WAYS for name in OWN_ATTENTION if way is not a_patch}
REFUSED |= {("a_compact_cache", "doge"), ("a_recompute", "doge"), ("an_mlp_write", "doge")}
REFUSED |= {("a_compact_cache", "jetmoe"), ("a_key_bias", "jetmoe"), ("heads_to_zero", "jetmoe")}


@pytest.mark.parametrize("name", [*CONFIGS, *ODD])
@pytest.mark.parametrize("way", WAYS)
def test_the_effect_is_that_of_plain_transformers_or_it_is_refused(way: Callable[..., Any], name: str) -> None:
    if (way.__name__, name) in REFUSED:
        with pytest.raises(kv.UnsupportedError) as error:
            way(name)
        refused(name, error)
        return
    got, want = way(name)
    torch.testing.assert_close(got.to(want), want, rtol=0, atol=1e-5 if name in ODD else 1e-6)
    plain = full_logits(model_of(name).hf, torch.tensor([IDS]))[0, -1]
    if way is not a_recompute:
        assert (want - plain).abs().max() > 1e-3, "the control: without it the logits differ"


@pytest.mark.parametrize("name", [*CONFIGS, *ODD])
def test_check_names_the_hazard_or_passes(name: str) -> None:
    report = model_of(name).check()
    bad = {check.name: check.detail for check in report.failures}
    if name not in ODD or name == "hyperclovax":
        assert report.passed, bad
        return
    assert not report.passed
    assert all("refused" in detail for detail in bad.values()), bad
    assert all(check["value"] is None or check["passed"] for check in report.to_dict()["checks"])
    said = {
        "doge": ("attention mask", "not what it read plus"),
        "jetmoe": ("attends to 4 key heads and caches 2", "no output projection"),
    }
    for words in said.get(name, ("did not call the attention function",)):
        assert words in " ".join(bad.values())


def test_records_and_knockouts_of_a_model_that_runs_its_own_attention_are_refused() -> None:
    model = model_of("falcon")
    cache = engine.prefill(model, IDS[:CUT])
    assert attention.refusal(model.hf)
    for call in (
        lambda: engine.attention_rows(model, cache, IDS[CUT:]),
        lambda: engine.capture(model, cache, IDS[CUT:], want=("patterns",)),
        lambda: engine.blend(model, cache, range(2, 6), 2),
    ):
        with pytest.raises(kv.UnsupportedError, match=r"FalconForCausalLM.*layer 0.*refused"):
            call()


# --- state that was checked at load is checked in every pass ---------------------------------------------------------


def compiled_parts() -> dict[str, Callable[[Any], Any]]:
    def inner(hf: Any) -> Any:
        hf.model.compile()

    def forward(hf: Any) -> Any:
        hf.forward = torch.compile(hf.forward)

    def layer(hf: Any) -> Any:
        hf.model.layers[1] = torch.compile(hf.model.layers[1])

    def attention_forward(hf: Any) -> Any:
        hf.model.layers[1].self_attn.forward = torch.compile(hf.model.layers[1].self_attn.forward)

    def traced(hf: Any) -> Any:
        hf.model.layers[1].mlp = torch.jit.trace(hf.model.layers[1].mlp, torch.randn(1, 3, 32))

    def graph(hf: Any) -> Any:
        hf.model.layers[0].mlp = torch.fx.symbolic_trace(hf.model.layers[0].mlp)

    return {f.__name__: f for f in (inner, forward, layer, attention_forward, traced, graph)}


@pytest.mark.parametrize("how", compiled_parts())
def test_a_compiled_model_is_refused_at_load_and_in_every_pass(how: str) -> None:
    change = compiled_parts()[how]
    hf = build("llama", dtype=torch.float32, exact=False)
    change(hf)
    with pytest.raises(kv.UnsupportedError, match="compiled, traced or scripted"):
        kv.load(hf)
    hf = build("llama", dtype=torch.float32, exact=False)
    model = kv.load(hf)
    cache = engine.prefill(model, IDS[:CUT])
    change(hf)
    for call in (lambda: engine.decide(model, cache, IDS[CUT:]), lambda: engine.prefill(model, IDS)):
        with pytest.raises(kv.KVNotesError, match=r"compiled|was written by"):
            call()
    with pytest.raises(kv.UnsupportedError, match="compiled"):
        engine.prefill(model, IDS)


def test_a_whole_compiled_model_is_no_model_to_load() -> None:
    with pytest.raises(kv.KVNotesError, match="OptimizedModule"):
        kv.load(torch.compile(build("llama", dtype=torch.float32, exact=False)))


@pytest.mark.parametrize("part", ["all", "layer", "dropout"])
def test_training_mode_after_load_is_refused(part: str) -> None:
    config = CONFIGS["phi"]()
    config.resid_pdrop = config.attention_dropout = 0.5
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config)
    initialise(hf, 0)
    model = kv.load(hf.train())
    assert not hf.training, "load puts it into eval mode"
    cache = engine.prefill(model, IDS[:CUT])
    before = engine.decide(model, cache, IDS[CUT:])
    modules = {"all": hf, "layer": hf.model.layers[1], "dropout": hf.model.layers[0].resid_dropout}
    modules[part].train()
    for call in (
        lambda: engine.decide(model, cache, IDS[CUT:]),
        lambda: engine.capture(model, cache, IDS[CUT:]),
        lambda: engine.recompute(model, cache, (2, 3)),
        lambda: engine.sweep(model, cache, cache, [kv.Site(())], IDS[CUT:], (1, 2)),
        lambda: model.check(),
    ):
        with pytest.raises(kv.UnsupportedError, match=r"training mode.*eval\(\)"):
            call()
    hf.eval()
    assert torch.equal(engine.decide(model, cache, IDS[CUT:]), before)


def test_a_module_run_past_its_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers called as `layer.forward(...)` run no hook: an edit there would be left out without a word."""
    model = kv.load(build("llama"))
    layer = compat.layers(model.hf)[1]
    monkeypatch.setattr(type(layer), "__call__", lambda self, *a, **k: self.forward(*a, **k))
    vector = torch.ones(1, 1, model.shape.d_model)
    with pytest.raises(kv.UnsupportedError, match="hook on the input of layer 0 was called 0 times"):
        engine.capture(model, None, IDS, edits=Edits(residual=ResidualPatch((LAST,), {1: vector})))


def test_an_attention_that_is_replaced_after_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model = kv.load(build("llama", attn="sdpa"))
    cache = engine.prefill(model, IDS[:CUT])
    own = modeling_llama.eager_attention_forward

    class Nowhere:
        def get_interface(self, *_: Any) -> Any:
            return own

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Nowhere())
    with pytest.raises(kv.UnsupportedError, match="layer 0 did not call the attention function"):
        engine.capture(model, cache, IDS[CUT:], edits=Edits(cuts=[Cut(keys=(2,))]))


# --- what does not exist is refused before anything runs -------------------------------------------------------------

N = 3  # layers of the tiny Llama, 4 heads, 2 KV heads, width 32, d_head 8
ZERO = torch.zeros
WRONG: dict[str, Edits] = {
    "cut layer": Edits(cuts=[Cut(keys=(2,), layers=(N + 5,))]),
    "cut layer -1": Edits(cuts=[Cut(keys=(2,), layers=(-1,))]),
    "cut head": Edits(cuts=[Cut(keys=(2,), heads=(4,))]),
    "cut head -1": Edits(cuts=[Cut(keys=(2,), heads=(-1,))]),
    "cut key": Edits(cuts=[Cut(keys=(len(IDS),))]),
    "cut key -1": Edits(cuts=[Cut(keys=(-1,))]),
    "cut query": Edits(cuts=[Cut(keys=(2,), queries=(CUT - 1,))]),
    "cut of the future": Edits(cuts=[Cut(keys=(LAST,), queries=(CUT,))]),
    "rows": Edits(cuts=[[], []]),
    "residual layer": Edits(residual=ResidualPatch((LAST,), {N + 1: ZERO(1, 1, 32)})),
    "residual layer -1": Edits(residual=ResidualPatch((LAST,), {-1: ZERO(1, 1, 32)})),
    "residual slot": Edits(residual=ResidualPatch((CUT - 1,), {0: ZERO(1, 1, 32)})),
    "residual width": Edits(residual=ResidualPatch((LAST,), {0: ZERO(1, 1, 1)})),
    "residual slots": Edits(residual=ResidualPatch((LAST, LAST - 1), {0: ZERO(1, 1, 32)})),
    "residual twice": Edits(residual=ResidualPatch((LAST, LAST), {0: ZERO(1, 2, 32)})),
    "residual rows": Edits(residual=ResidualPatch((LAST,), {0: ZERO(2, 1, 32)})),
    "head layer": Edits(heads=HeadPatch((LAST,), {N: ZERO(1, 1, 4, 8)}, {N: ZERO(1, 1, 4).bool()})),
    "head take": Edits(heads=HeadPatch((LAST,), {1: ZERO(1, 1, 4, 8)}, {})),
    "head outputs": Edits(heads=HeadPatch((LAST,), {}, {1: ZERO(1, 1, 4).bool()})),
    "head count": Edits(heads=HeadPatch((LAST,), {1: ZERO(1, 1, 1, 8)}, {1: ZERO(1, 1, 4).bool()})),
    "head take count": Edits(heads=HeadPatch((LAST,), {1: ZERO(1, 1, 4, 8)}, {1: ZERO(1, 1, 1).bool()})),
    "head width": Edits(heads=HeadPatch((LAST,), {1: ZERO(1, 1, 4, 1)}, {1: torch.ones(1, 1, 4).bool()})),
    "head query": Edits(heads=HeadPatch((0,), {1: ZERO(1, 1, 4, 8)}, {1: ZERO(1, 1, 4).bool()})),
    "write layer": Edits(writes=[WritePatch("mlp", (LAST,), {N: ZERO(1, 1, 32)})]),
    "write part": Edits(writes=[WritePatch("mpl", (LAST,), {0: ZERO(1, 1, 32)})]),  # type: ignore[arg-type]
    "write shape": Edits(writes=[WritePatch("mlp", (LAST,), {0: ZERO(1, 32)})]),
    "write slot": Edits(writes=[WritePatch("attention", (LAST + 1,), {0: ZERO(1, 1, 32)})]),
    "write over write": Edits(writes=[WritePatch("mlp", (LAST,), {0: ZERO(1, 1, 32)})] * 2),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_edit_of_what_does_not_exist_is_refused_by_name(what: str) -> None:
    model = tiny("llama")
    head = engine.prefill(model, IDS[:CUT])
    seen: list[int] = []
    handle = compat.layers(model.hf)[0].register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        with pytest.raises(kv.InputError, match=r"\d|names|mpl"):
            engine.capture(model, head, IDS[CUT:], edits=WRONG[what])
    finally:
        handle.remove()
    if what != "head width":
        assert not seen, "nothing may run before it is refused"


@pytest.mark.parametrize(
    ("positions", "says"),
    [((9, 10), "2"), (range(8, 13), "before"), ((9, 10, 10, 11, 12), "rise"), ((9, 11, 10, 12, 13), "rise")],
)
def test_positions_that_do_not_fit_are_refused_before_the_pass(positions: Any, says: str) -> None:
    model = tiny("llama")
    head = engine.prefill(model, IDS[:CUT])
    for call in (engine.capture, engine.extend):
        with pytest.raises(kv.InputError, match=says):
            call(model, head, IDS[CUT:], positions=positions)


def test_tokens_answers_and_rows_that_do_not_exist() -> None:
    model = tiny("llama")
    head = engine.prefill(model, IDS[:CUT])
    for answers in ((1, 97), (-1, 2)):  # a negative one would be read from the end of the vocabulary
        with pytest.raises(kv.InputError, match="answers holds"):
            engine.decide(model, head, IDS[CUT:], answers)
        with pytest.raises(kv.InputError, match="answers holds"):
            engine.sweep(model, head, head, [kv.Site(())], IDS[CUT:], answers)
    for ids in ([3, 97], [3, -1]):
        with pytest.raises(kv.InputError, match="token_ids holds"):
            engine.prefill(model, ids)
    for rows in (0, 6):
        with pytest.raises(kv.InputError, match="rows="):
            engine.attention_rows(model, head, IDS[CUT:], rows=rows)


@pytest.mark.parametrize("call", ["sweep", "capture", "recompute"])
def test_what_cannot_be_done_on_a_compact_cache_is_refused_by_name(call: str) -> None:
    model = tiny("llama")
    compact: Any = kv.CompactCache.of(engine.prefill(model, IDS[:CUT]))
    calls = {
        "sweep": lambda: engine.sweep(model, compact, compact, [kv.Site((0,))], IDS[CUT:], (1, 2)),
        "capture": lambda: engine.capture(model, compact, IDS[CUT:]),
        "recompute": lambda: engine.recompute(model, compact, (1,)),
    }
    with pytest.raises(kv.InputError, match="compact cache"):
        calls[call]()


# --- everything that a pass can see goes through every way of making a cache ------------------------------------------


def biased(model: kv.Model, ids: list[int], seed: int) -> kv.KVCache:
    cache = engine.prefill(model, ids)
    generator = torch.Generator().manual_seed(seed)
    bias = [torch.randn(k.shape[:3], generator=generator).to(k) for k in cache.keys]
    return dataclasses.replace(cache, bias=(None, *bias[1:]))


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in EAGER_ONLY])
@pytest.mark.parametrize("which", ["base", "donor", "both"])
def test_patching_everything_from_a_biased_donor_is_the_donor(name: str, which: str) -> None:
    model = tiny(name)
    other = [*IDS[:2], 90, *IDS[3:CUT]]
    base = biased(model, IDS[:CUT], 1) if which != "donor" else engine.prefill(model, IDS[:CUT])
    donor = biased(model, other, 2) if which != "base" else engine.prefill(model, other)
    whole, keys, one = kv.Site(range(CUT)), kv.Site(range(CUT), part="k"), kv.Site((2, 3), layers=(1,), kv_heads=(1,))
    if model.shape.n_kv_heads < 2:
        one = kv.Site((2, 3), layers=(1,))
    values = kv.Site(range(CUT), part="v")
    tail, answers = IDS[CUT:], (5, 17)
    want = [engine.decide(model, base.patched(s, donor), tail, answers)[0] for s in (whole, keys, values, one)]
    torch.testing.assert_close(want[0], engine.decide(model, donor, tail, answers)[0], **EXACT)
    for path in ("shared", "plain"):
        got = engine.sweep(model, base, donor, [whole, keys, values, one], tail, answers, path=path)  # type: ignore[arg-type]
        torch.testing.assert_close(got.scores, torch.stack(want).cpu(), **ROUNDED)
    # By hand: keys take their bias with them, values do not.
    zeros = [torch.zeros(k.shape[:3]).to(k) for k in base.keys]
    own, theirs = ([z if b is None else b for z, b in zip(zeros, c.bias or (None,) * 9)] for c in (base, donor))
    assert all(torch.equal(a, b) for a, b in zip(base.patched(keys, donor).bias or (), theirs, strict=True))
    kept = base.patched(values, donor).bias
    assert all(torch.equal(a, b) for a, b in zip(kept or (), own, strict=True))


def test_rows_and_slots_of_a_cache_keep_bias_and_end() -> None:
    model = tiny("llama")
    cache = dataclasses.replace(biased(model, IDS[:CUT], 3), end=40)
    assert cache.repeat(batch=3).row(1) == cache
    taken = cache.take([4, 2, 2])
    assert taken.end == 40
    assert taken.bias is not None
    assert cache.bias is not None
    assert torch.equal(taken.bias[1], cache.bias[1][..., [4, 2, 2]])
    assert taken.positions.tolist() == [4, 2, 2]
    assert kv.CompactCache.of(cache).end == 40
    with pytest.raises(kv.InputError, match="row 3"):
        cache.repeat(batch=3).row(3)
    with pytest.raises(kv.InputError, match="slots"):
        cache.take([9])


def test_a_bias_of_another_shape_is_refused() -> None:
    """It would be stretched over the keys, or would bias only the first of them."""
    cache = engine.prefill(tiny("llama"), IDS[:CUT])
    for shape in ((1, 2, CUT - 1), (1, 1, CUT), (2, CUT)):
        with pytest.raises(kv.InputError, match="bias"):
            dataclasses.replace(cache, bias=tuple(torch.zeros(shape) for _ in cache.keys))


def test_numbers_under_autocast_are_refused() -> None:
    """They would be of 16 bits under a manifest that says float32."""
    model = kv.load(build("llama", dtype=torch.float32, exact=False))
    cache = engine.prefill(model, IDS[:CUT])
    calls = (
        lambda: engine.prefill(model, IDS),
        lambda: engine.decide(model, cache, IDS[CUT:]),
        lambda: engine.capture(model, cache, IDS[CUT:]),
        lambda: engine.recompute(model, cache, (2, 3)),
        lambda: engine.sweep(model, cache, cache, [kv.Site(())], IDS[CUT:], (1, 2)),
    )
    for call in calls:
        call()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(kv.UnsupportedError, match=r"autocast.*bfloat16"):
            call()


@pytest.mark.parametrize("probe", ["circuit_ablation", "suffix_concentration", "edit_frontier", "linear_decodability"])
def test_probes_that_need_what_a_model_cannot_are_refused_before_anything_is_written(
    probe: str, tmp_path: Path
) -> None:
    falcon = dataclasses.replace(model_of("falcon"), tokenizer=tiny_tokenizer())
    with pytest.raises(kv.UnsupportedError, match=r"FalconForCausalLM.*refused"):
        getattr(kv.probes, probe)(falcon, kv.tasks.pronoun(n=2), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_cut_and_a_bias_on_the_real_model(smollm2: kv.Model) -> None:
    """Against its own forward under an explicit mask: two keys that the last token may not see."""
    ids = smollm2.tokenizer("Once Mary went to the market. The place was crowded. Afterwards,")["input_ids"]
    n, hidden = len(ids), (1, 5)
    mask = torch.zeros(1, 1, n, n).masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
    plain = full_logits(smollm2.hf, torch.tensor([ids]))[0, -1]
    mask[0, 0, -1, list(hidden)] = -torch.inf
    with torch.no_grad():
        want = smollm2.hf(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0, -1]
    head = engine.prefill(smollm2, ids[:-1])
    cut = engine.capture(smollm2, head, ids[-1:], edits=Edits(cuts=[Cut(keys=hidden)]), want=())
    at = torch.tensor([p in hidden for p in range(n - 1)])
    bias = tuple((at * -1e9).expand(k.shape[:3]) for k in head.keys)
    biased = engine.decide(smollm2, dataclasses.replace(head, bias=bias), ids[-1:])[0]
    for got in (engine.logits_of(smollm2, cut.hidden[0, -1]), biased):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    assert (want - plain).abs().max() > 0.1
