"""What `capture` records and edits, against plain forwards with hooks on the models' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvnotes_interp import compat, engine
from kvnotes_interp.engine import Cut, Edits, HeadPatch, ResidualPatch, WritePatch
from kvnotes_interp.errors import InputError
from tests.architectures import ARCHITECTURES
from tests.reference import full_logits
from tests.tiny import tiny

OLD = [7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
NEW = [7, 31, 90, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]
CUT = 9  # the cache holds this many tokens
ANSWERS = (5, 17)
EXACT = {"rtol": 0, "atol": 1e-10}


def _seen(model: Any, ids: list[int]) -> dict[str, list[Tensor]]:
    """Inputs of output projections, outputs of the MLPs (or the norm behind them), by hooks of our own."""
    seen: dict[str, list[Tensor]] = {"z": [], "mlp": []}
    handles = []
    for layer in compat.layers(model.hf):
        inner = compat.output_projection(layer)
        handles.append(inner.register_forward_pre_hook(lambda _m, args: seen["z"].append(args[0])))
        names = ("post_feedforward_layernorm", "post_mlp_layernorm", "mlp", "feed_forward")
        write = next(m for n in names if (m := getattr(layer, n, None)) is not None)

        def keep(_m: nn.Module, _a: Any, out: Any) -> None:
            seen["mlp"].append(out[0] if isinstance(out, tuple) else out)

        handles.append(write.register_forward_hook(keep))
    full_logits(model.hf, torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_records_are_what_the_models_own_modules_see(name: str) -> None:
    model = tiny(name)
    slots = (CUT + 1, len(OLD) - 1)
    got = engine.capture(
        model,
        engine.prefill(model, OLD[:CUT]),
        OLD[CUT:],
        slots=slots,
        want=("residual", "attention", "mlp", "heads"),
    )
    with torch.no_grad():
        out = model.hf(input_ids=torch.tensor([OLD]), output_hidden_states=True, use_cache=False)
    seen = _seen(model, OLD)
    scale = [compat.residual_scale(layer) for layer in compat.layers(model.hf)]
    for layer in range(model.shape.n_layers):
        torch.testing.assert_close(got.residual[layer, 0], out.hidden_states[layer][0, list(slots)], **EXACT)
        torch.testing.assert_close(got.heads[layer, 0].flatten(1), seen["z"][layer][0, list(slots)], **EXACT)
        mlp = seen["mlp"][layer].view(1, len(OLD), -1)[0, list(slots)] * scale[layer]
        torch.testing.assert_close(got.mlp[layer, 0], mlp, **EXACT)
    whole = got.residual[:-1] + got.attention + got.mlp
    torch.testing.assert_close(whole, got.residual[1:], **EXACT)
    logits = engine.answer_logits(model, got, ANSWERS)[0]
    torch.testing.assert_close(logits, out.logits[0, -1, list(ANSWERS)], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "llama_biased", "qwen3", "gpt_neox", "granite", "cohere"])
def test_head_writes_sum_to_what_attention_adds(name: str) -> None:
    model = tiny(name)
    got = engine.capture(model, None, OLD, want=("attention", "heads"))
    for layer, module in enumerate(compat.layers(model.hf)):
        bias = compat.output_projection(module).bias
        total = engine.head_writes(model, layer, got.heads[layer]).sum(-2)
        total = total if bias is None else total + bias * compat.residual_scale(module)
        torch.testing.assert_close(total, got.attention[layer], **EXACT)


def _reference_cut(name: str, allowed: Tensor) -> Tensor:
    """Logits of the model's own eager attention under an additive mask `[head query key]`."""
    hf = tiny(name, "eager").hf
    mask = torch.zeros(1, *allowed.shape, dtype=torch.float64).masked_fill(~allowed[None], float("-inf"))
    with torch.no_grad():
        return hf(input_ids=torch.tensor([OLD]), attention_mask=mask, use_cache=False).logits[0]


@pytest.mark.parametrize("name", ["llama", "yarn", "qwen3", "phi", "gpt_neox", "granite"])
def test_cut_edges_equal_an_explicit_mask(name: str) -> None:
    model = tiny(name)
    n = len(OLD)
    allowed = torch.ones(n, n).tril().bool().repeat(model.shape.n_heads, 1, 1)
    allowed[2, n - 1, 4:6] = False
    allowed[:, CUT:, 2] = False
    cuts = [Cut(keys=(4, 5), queries=(n - 1,), heads=(2,)), Cut(keys=(2,))]
    head = engine.prefill(model, OLD[:CUT])
    got = engine.capture(model, head, OLD[CUT:], edits=Edits(cuts=cuts))
    want = _reference_cut(name, allowed)[CUT:]
    torch.testing.assert_close(compat.unembed(model.hf, got.hidden[0]), want, rtol=0, atol=1e-6)
    plain = full_logits(model.hf, torch.tensor([OLD]))[0, CUT:]
    assert (want - plain).abs().max() > 1e-3  # the control: the cut matters


def test_rows_of_a_batch_have_their_own_cuts() -> None:
    model = tiny("qwen3")
    head, last = engine.prefill(model, OLD[:-1]), len(OLD) - 1
    rows = [[], [Cut(keys=(2,))], [Cut(keys=(2,), layers=(1,)), Cut(keys=(0, 1), heads=(0,))]]
    together = engine.capture(model, head.repeat(batch=3), OLD[-1:], edits=Edits(cuts=rows))
    for index, row in enumerate(rows):
        alone = engine.capture(model, head, OLD[-1:], slots=(last,), edits=Edits(cuts=row))
        torch.testing.assert_close(together.hidden[index], alone.hidden[0], **EXACT)
    torch.testing.assert_close(together.hidden[0], engine.extend(model, head, OLD[-1:])[1][0], **EXACT)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox", "olmo2"])
def test_head_patches_equal_a_hook_on_the_output_projection(name: str) -> None:
    model = tiny(name)
    last, layer, head = len(OLD) - 1, model.shape.n_layers - 2, 2
    donor = engine.capture(model, None, NEW, slots=(last,), want=("heads",))
    take = torch.zeros(1, 1, model.shape.n_heads, dtype=torch.bool)
    take[..., head] = True
    patch = HeadPatch(queries=(last,), outputs={layer: donor.heads[layer]}, take={layer: take})
    got = engine.capture(model, None, OLD, edits=Edits(heads=patch))
    theirs, d_head = _seen(model, NEW)["z"][layer], model.shape.d_head

    def replace(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z = args[0].clone()
        z[0, last, head * d_head : (head + 1) * d_head] = theirs[0, last, head * d_head : (head + 1) * d_head]
        return (z, *args[1:])

    handle = compat.output_projection(compat.layers(model.hf)[layer]).register_forward_pre_hook(replace)
    want = full_logits(model.hf, torch.tensor([OLD]))[0]
    handle.remove()
    torch.testing.assert_close(compat.unembed(model.hf, got.hidden[0]), want, rtol=0, atol=1e-9)
    assert (want - full_logits(model.hf, torch.tensor([OLD]))[0]).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "granite", "olmo3", "cohere2"])
def test_the_donors_writes_at_the_last_token_give_the_donors_decision(name: str) -> None:
    """Same last token, so same embedding: with every write replaced, the decision is the donor's whatever the cache."""
    model, last = tiny(name), len(OLD) - 1
    donor = engine.capture(model, None, NEW, slots=(last,), want=("attention", "mlp"))
    every = range(model.shape.n_layers)
    writes = [
        WritePatch("attention", (last,), {i: donor.attention[i] for i in every}),
        WritePatch("mlp", (last,), {i: donor.mlp[i] for i in every}),
    ]
    head = engine.prefill(model, OLD[:-1])
    old = engine.capture(model, head, OLD[-1:])
    got = engine.capture(model, head, OLD[-1:], edits=Edits(writes=writes))
    torch.testing.assert_close(got.hidden[:, -1], donor.hidden[:, -1], **EXACT)
    some = engine.capture(model, head, OLD[-1:], edits=Edits(writes=writes[1:]))
    assert (some.hidden - donor.hidden[:, -1:]).abs().max() > 1e-4  # the MLPs alone do not
    assert (old.hidden[:, -1] - donor.hidden[:, -1]).abs().max() > 1e-4


@pytest.mark.parametrize("at", [0, 1, 3])
def test_adding_the_gap_between_two_residuals_moves_one_run_onto_the_other(at: int) -> None:
    model, last = tiny("llama"), len(OLD) - 1
    donor = engine.capture(model, None, NEW, slots=(last,))
    donor_cache = engine.prefill(model, NEW[:-1])
    base = engine.capture(model, donor_cache, [11], slots=(last,))  # another last token on the donor's cache
    gap = ResidualPatch((last,), {at: donor.residual[at] - base.residual[at]})
    got = engine.capture(model, donor_cache, [11], edits=Edits(residual=gap))
    if at == 0:  # the embedding alone differed
        torch.testing.assert_close(got.hidden[:, -1], donor.hidden[:, -1], **EXACT)
    torch.testing.assert_close(got.residual[at], donor.residual[at], **EXACT)
    assert got.cache.token_ids[0, -1] == 11


def test_capture_leaves_nothing_behind() -> None:
    model = tiny("gemma3")
    head = engine.prefill(model, OLD[:CUT])
    before = engine.extend(model, head, OLD[CUT:])[1]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()]
    with pytest.raises(InputError, match="without any key"):
        engine.capture(model, head, OLD[CUT:], edits=Edits(cuts=[Cut(keys=tuple(range(len(OLD))))]))
    engine.capture(model, head, OLD[CUT:], want=("residual", "attention", "mlp", "heads", "patterns", "queries"))
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()] == hooks
    torch.testing.assert_close(engine.extend(model, head, OLD[CUT:])[1], before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": (3,)}, "slots holds 3; the new tokens stand at slots 9 to 13"),
        ({"want": ("residul",)}, "want holds 'residul'.*residual"),
        ({"edits": Edits(cuts=[Cut(keys=(14,))])}, "cuts.keys holds 14; the sequence has slots 0 to 13"),
        ({"edits": Edits(cuts=[[], []])}, "2 lists of cuts for a batch of 1"),
    ],
)
def test_bad_input_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    model = tiny("llama")
    with pytest.raises(InputError, match=message):
        engine.capture(model, engine.prefill(model, OLD[:CUT]), OLD[CUT:], **options)
