"""The test bed itself: the tiny models are what they claim to be, and the slow references agree with each other."""

from __future__ import annotations

import time
from functools import lru_cache

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from tests.architectures import ARCHITECTURES, EAGER_ONLY, REFUSED, VOCAB, build
from tests.reference import answer_with_cache, full_cache, full_logits, patched, patched_logits
from tests.tiny_tokenizer import tiny_tokenizer, train

CUT = 11
IDS = torch.tensor([[7, 31, 12, 55, 8, 60, 3, 44, 19, 71, 25, 66, 13, 9]])
OTHER = torch.tensor([[61, 2, 40, 23, 70, 5, 52, 16, 33, 27, 48, 66, 13, 9]])  # the same last three tokens
TAIL = torch.arange(CUT, IDS.shape[1])

# How each layer turns its keys: dimensions turned, pairing, and the buffer that holds the frequencies.
# "half" pairs i with i + rotary_dim / 2, "next" pairs 2i with 2i + 1, "-half" turns the other way round.
Turn = tuple[int, str, str]
NONE: Turn = (0, "none", "")


def _half(dim: int, buffer: str = "inv_freq") -> Turn:
    return (dim, "half", buffer)


def _next(dim: int) -> Turn:
    return (dim, "next", "inv_freq")


_SLIDE, _FULL = "sliding_attention_inv_freq", "full_attention_inv_freq"
TURNS: dict[str, list[Turn]] = {
    "qwen3": [_half(16)] * 3,
    "qwen3_moe": [_half(16)] * 2,
    "gemma2": [_half(16)] * 4,
    "gemma3": [_half(16, _SLIDE), _half(16, _SLIDE), _half(16, _FULL), _half(16, _SLIDE)],
    "phi": [_half(4)] * 3,
    "phi3": [_half(4)] * 3,
    "gpt_neox": [_half(6)] * 3,
    "gpt_neox_serial": [_half(4)] * 2,
    "cohere": [_next(8)] * 3,
    "cohere2": [_next(8), _next(8), NONE, _next(8)],
    "glm": [_next(6)] * 3,
    "glm4": [_next(8)] * 3,
    "ernie4_5": [_next(8)] * 3,
    "helium": [_next(8)] * 3,
    "smollm3": [_half(8), NONE, _half(8), NONE],
    "olmo3": [_half(8, _SLIDE), _half(8, _FULL)] * 2,
    "stablelm": [_half(2)] * 3,
    "exaone4": [_half(8), _half(8), NONE, _half(8)],
    "nanochat": [(8, "-half", "inv_freq")] * 3,
    "nemotron": [_half(4)] * 3,
    "afmoe": [_half(8), NONE],
}


@lru_cache(maxsize=64)
def tiny_hf(name: str) -> PreTrainedModel:
    return build(name)


def turn(keys: Tensor, steps: int, frequencies: Tensor, pairing: str) -> Tensor:
    """Each pair of dimensions as a complex number, multiplied by a phase."""
    half = len(frequencies)
    head, rest = keys[..., : 2 * half], keys[..., 2 * half :]
    first, second = (head[..., 0::2], head[..., 1::2]) if pairing == "next" else (head[..., :half], head[..., half:])
    angle = steps * frequencies.double() * (-1 if pairing.startswith("-") else 1)
    out = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    parts = torch.stack((out.real, out.imag), -1)
    return torch.cat(((parts if pairing == "next" else parts.mT).flatten(-2), rest), -1)


def gap(a: Tensor, b: Tensor) -> float:
    """Relative difference, norm over norm."""
    return float((a - b).norm() / b.norm())


def frequencies(hf: PreTrainedModel, buffer: str) -> Tensor:
    return next(b for name, b in hf.named_buffers() if name.rsplit(".", 1)[-1] == buffer)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_cached_suffix_is_the_full_pass(name: str) -> None:
    hf = tiny_hf(name)
    got = answer_with_cache(hf, full_cache(hf, IDS[:, :CUT]), IDS[:, CUT:], TAIL)
    torch.testing.assert_close(got, full_logits(hf, IDS)[:, CUT:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_patching_everything_is_the_donor(name: str) -> None:
    hf = tiny_hf(name)
    base, donor = full_cache(hf, IDS[:, :CUT]), full_cache(hf, OTHER[:, :CUT])
    site = {"layers": None, "kv_heads": None, "tail_ids": IDS[:, CUT:], "tail_positions": TAIL}
    got = patched_logits(hf, base, donor, positions=range(CUT), part="kv", **site)
    want = full_logits(hf, OTHER)[:, CUT:]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert (got - full_logits(hf, IDS)[:, CUT:]).abs().max() > 0.1


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_patched_cell_is_visible(name: str, part: str) -> None:
    """Attention matters in these models: one key or value, of one head in one layer, moves the logits."""
    hf = tiny_hf(name)
    base, donor = full_cache(hf, IDS[:, :CUT]), full_cache(hf, OTHER[:, :CUT])
    site = {"part": part, "kv_heads": [1], "tail_ids": IDS[:, CUT:], "tail_positions": TAIL}
    before = answer_with_cache(hf, base, IDS[:, CUT:], TAIL)
    after = patched_logits(hf, base, donor, layers=[1], positions=[CUT - 1], **site)
    assert (after - before)[:, -1].abs().max() > 1e-3


@pytest.mark.parametrize("name", [*ARCHITECTURES, "afmoe"])
def test_keys_at_an_offset_are_turned_keys(name: str) -> None:
    hf = tiny_hf(name)
    here, there = full_cache(hf, IDS), full_cache(hf, IDS, torch.arange(IDS.shape[1]) + 40)
    turns = TURNS.get(name, [_half(8)] * len(here))
    assert len(turns) == len(here)
    for (key, value), (moved, other), (dim, pairing, buffer) in zip(here, there, turns, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-10)
        if pairing == "none":
            torch.testing.assert_close(key, moved, rtol=0, atol=1e-10)
            continue
        f = frequencies(hf, buffer)
        assert 2 * len(f) == dim
        assert gap(turn(key, 40, f, pairing), moved) < 1e-12
        wrong = {"half", "next", "-half"} - {pairing} - ({"next"} if dim == 2 else set())  # one pair has one pairing
        assert all(gap(turn(key, 40, f, other_pairing), moved) > 1e-2 for other_pairing in wrong)
        assert gap(key, moved) > 0.1


def test_a_norm_after_the_rotation_is_no_rotation() -> None:
    """Why hunyuan must be refused: what is cached is turned first and weighted per dimension afterwards."""
    hf = tiny_hf("hunyuan")
    here, there = full_cache(hf, IDS), full_cache(hf, IDS, torch.arange(IDS.shape[1]) + 40)
    f = frequencies(hf, "inv_freq")
    assert all(gap(turn(a, 40, f, "half"), b) > 1e-2 for (a, _), (b, _) in zip(here, there, strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_can_be_replayed_one_by_one(name: str) -> None:
    """Recorded keyword arguments serve a wider batch, with masks and position embeddings left at batch 1."""
    hf = tiny_hf(name)
    body, kvs = hf.base_model, full_cache(hf, IDS[:, :CUT])
    calls: list[tuple[tuple, dict]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for layer in body.layers
    ]
    with torch.no_grad():
        want = answer_with_cache(hf, kvs, IDS[:, CUT:], TAIL)
        for hook in hooks:
            hook.remove()
        cache = DynamicCache()
        for index, (key, value) in enumerate(kvs):
            cache.update(key.repeat(3, 1, 1, 1), value.repeat(3, 1, 1, 1), index)
        hidden = calls[0][0][0].repeat(3, 1, 1)
        for layer, (args, kwargs) in zip(body.layers, calls, strict=True):
            assert len(args) == 1, "only the hidden state is positional"
            hidden = layer(hidden, **{k: cache if isinstance(v, Cache) else v for k, v in kwargs.items()})
        norm = next(getattr(body, n) for n in ("norm", "final_layer_norm", "final_layernorm") if hasattr(body, n))
        logits = hf.get_output_embeddings()(norm(hidden))
    config = hf.config
    logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    torch.testing.assert_close(logits, want.expand(3, -1, -1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sdpa_is_eager(name: str) -> None:
    if name in EAGER_ONLY:
        with pytest.raises(ValueError, match="does not support an attention implementation"):
            build(name, attn="sdpa")
        return
    got = full_logits(build(name, attn="sdpa"), IDS)
    torch.testing.assert_close(got, full_logits(tiny_hf(name), IDS), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *REFUSED])
def test_models_are_small_seeded_and_ready(name: str) -> None:
    tiny_hf(name)  # the first of a family pays for its import
    start = time.process_time()
    hf = build(name)
    assert time.process_time() - start < 2, "meant to take a tenth of that"
    assert sum(p.numel() for p in hf.parameters()) < 100_000
    assert not hf.training
    assert all(not p.requires_grad and p.dtype == torch.float64 for p in hf.parameters())
    logits = full_logits(hf, IDS)
    assert logits.shape == (1, IDS.shape[1], VOCAB)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, full_logits(tiny_hf(name), IDS))


def test_seed_dtype_and_vocab_are_obeyed() -> None:
    one, two = full_logits(build("llama", seed=1), IDS), full_logits(build("llama", seed=2), IDS)
    assert (one - two).abs().max() > 0.1
    state = torch.get_rng_state()
    half = build("gemma3", dtype=torch.bfloat16, vocab=130)
    assert torch.equal(state, torch.get_rng_state())
    assert full_logits(half, IDS).dtype == torch.bfloat16
    assert full_logits(half, IDS).shape[-1] == 130
    assert all(b.dtype == torch.float32 for name, b in half.named_buffers() if name.endswith("inv_freq"))


def test_exact_lifts_float64_and_nothing_else() -> None:
    plain, exact = full_logits(build("llama", exact=False), IDS), full_logits(build("llama"), IDS)
    assert 1e-9 < (plain - exact).abs().max() < 1e-4
    single = build("llama", dtype=torch.float32)
    assert full_logits(single, IDS).dtype == torch.float32
    assert (full_logits(single, IDS) - exact).abs().max() < 1e-4


def test_patched_leaves_its_inputs_alone() -> None:
    hf = tiny_hf("qwen3")
    base, donor = full_cache(hf, IDS[:, :CUT]), full_cache(hf, OTHER[:, :CUT])
    before = [(key.clone(), value.clone()) for key, value in base]
    out = patched(base, donor, layers=[1], positions=[2, 5], part="k", kv_heads=[0])
    assert all(torch.equal(a, b) for x, y in zip(base, before, strict=True) for a, b in zip(x, y, strict=True))
    changed = torch.stack([(a[0] != b[0]).any(-1)[0] for a, b in zip(out, base, strict=True)])  # [layer head pos]
    assert changed.nonzero().tolist() == [[1, 0, 2], [1, 0, 5]]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(out, base, strict=True))


def test_positions_are_distances() -> None:
    """A gap without a cache needs the mask of ones, or transformers would cut the attention at it."""
    hf = tiny_hf("llama")
    positions = torch.cat((torch.arange(CUT), TAIL + 7))
    got = answer_with_cache(hf, full_cache(hf, IDS[:, :CUT]), IDS[:, CUT:], TAIL + 7)
    torch.testing.assert_close(got, full_logits(hf, IDS, positions)[:, CUT:], rtol=0, atol=1e-10)
    assert (got - full_logits(hf, IDS)[:, CUT:]).abs().max() > 1e-2


def test_the_tokenizer_is_a_small_fast_chatml_one() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.is_fast
    assert len(tokenizer) <= 512
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    text = "John went to the market. Größe 7°"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert [len(tokenizer(word)["input_ids"]) for word in (" he", " she", " Paris", " yes", " no")] == [1] * 5
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Is the order late?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nIs the order late?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat, add_special_tokens=False)["input_ids"].count(3) == 2
    assert tiny_tokenizer(bos=True)("he")["input_ids"][0] == 1
    assert train(["abc"], vocab=300).get_vocab() == train(["abc"], vocab=300).get_vocab()
    model = build("llama", vocab=len(tokenizer))
    assert full_logits(model, torch.tensor([ids])).shape[-1] == len(tokenizer)
