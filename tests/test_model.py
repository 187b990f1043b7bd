"""Loading, checking and refusing models."""

from __future__ import annotations

import pytest
import torch

import kvnotes_interp as kv
from kvnotes_interp import checks, compat, declared, rope
from kvnotes_interp.errors import UnsupportedError
from kvnotes_interp.model import wrap
from kvnotes_interp.rope import LayerRope, RopeGeometry
from kvnotes_interp.sources import ModelSource
from tests.architectures import ARCHITECTURES, REFUSED, build
from tests.tiny import tiny


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_check_passes_on_every_architecture(name: str) -> None:
    report = tiny(name).check()
    assert report.passed, report.failures
    assert report.sweep_path == "shared"
    assert len(report.checks) >= 9
    assert [c.detail for c in report.checks if c.name == declared.NAME] == [""]  # compared, not left out


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_supported_is_refused_by_name(name: str) -> None:
    hf = REFUSED[name]()
    with pytest.raises(UnsupportedError) as error:
        kv.load(hf)
    text = str(error.value)
    assert type(hf).__name__ in text or "failed" in text
    assert len(text) > 60, "the message must say why"


def test_a_model_is_known_again_wherever_its_files_lie() -> None:
    here, there, other = build("llama"), build("llama"), build("llama", seed=1)
    there.config._name_or_path, there.config.transformers_version = "/another/folder", "5.0.0"
    source = ModelSource(name="m", kind="live")
    assert wrap(here, None, source).model_id == wrap(there, None, source).model_id
    assert wrap(here, None, source).model_id != wrap(other, None, source).model_id


def test_a_wrong_geometry_fails_its_check() -> None:
    """The check must be able to fail: plain frequencies in place of llama3's scaled ones, and no rotation at all."""
    from dataclasses import replace

    right = tiny("llama3")
    plain = tiny("llama").rope
    for wrong in (plain, RopeGeometry(tuple(LayerRope(None) for _ in right.rope.layers))):
        report = replace(right, rope=wrong).check()
        assert report.failures[0].name.startswith("keys moved by")


def test_interleaved_and_half_split_are_told_apart() -> None:
    assert not rope.read_geometry(build("llama")).layers[0].interleaved
    assert rope.read_geometry(build("glm")).layers[0].interleaved


def test_partial_rotary_and_layers_without_rotary() -> None:
    phi3 = tiny("phi3")
    assert phi3.rope.layers[0].rotary_dim == phi3.shape.d_head // 2
    assert {layer.inv_freq is None for layer in tiny("smollm3").rope.layers} == {True, False}
    assert {layer.inv_freq is None for layer in tiny("cohere2").rope.layers} == {True, False}


def test_quantised_and_sliding_caches_are_refused_by_name() -> None:
    from transformers import DynamicCache

    hf = build("gemma3")
    cache = DynamicCache(config=hf.config)
    hf(input_ids=torch.tensor([[3, 4, 5]]), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="DynamicSlidingWindowLayer"):
        compat.read_cache(cache)


def test_unembed_rows_are_the_models_logits() -> None:
    for name in ("llama", "gemma2", "cohere", "granite", "phi"):
        model = tiny(name)
        ids = torch.tensor([[5, 9, 11, 2]])
        hidden = compat.forward(model.hf, ids, compat.new_cache(), torch.arange(4))
        want = model.hf(input_ids=ids).logits
        torch.testing.assert_close(compat.unembed(model.hf, hidden), want, rtol=0, atol=1e-9)
        some = torch.tensor([3, 90])
        torch.testing.assert_close(compat.unembed(model.hf, hidden, some), want[..., some], rtol=0, atol=1e-9)


def test_bf16_answers_are_float32() -> None:
    model = kv.load(build("llama", dtype=torch.bfloat16, exact=False))
    ids = torch.tensor([[5, 9, 11, 2]])
    hidden = compat.forward(model.hf, ids, compat.new_cache(), torch.arange(4))
    got = compat.unembed(model.hf, hidden, torch.tensor([3]))
    assert got.dtype == torch.float32
    assert float(got[0, -1, 0]) != float(got[0, -1, 0].bfloat16())


def test_the_report_reads_well() -> None:
    from rich.console import Console

    report = tiny("llama").check()
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report)
    text = console.export_text()
    assert "noise floor" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert report.to_dict()["passed"] is True
    assert set(checks.LIMITS) >= {torch.float32, torch.bfloat16}


def test_live_models_keep_their_attention_implementation() -> None:
    hf = build("llama", attn="sdpa")
    kv.load(hf)
    assert hf.config._attn_implementation == "sdpa"
