"""Reductions of a deviation map: worked out by hand, against slow loops, and by their invariants."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvnotes_interp.errors import InputError
from kvnotes_interp.probes.deviation import reductions as red

# One layer, two heads, one row, five keys; the chunk is keys 1 to 3.
ROWS = torch.tensor([[[[0.2, 0.4, 0.2, 0.2, 0.0]], [[0.5, 0.1, 0.1, 0.2, 0.1]]]])
OTHER = torch.tensor([[[[0.5, 0.1, 0.1, 0.2, 0.1]], [[0.2, 0.0, 0.0, 0.8, 0.0]]]])
SPAN = (1, 4)


def test_attention_inside_the_chunk_by_hand() -> None:
    got = red.within(ROWS, SPAN)[0, :, 0]
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]).double())
    raw = red.deviation(ROWS, OTHER, SPAN, renormalise=False)
    # |0.4-0.1|, |0.1-0| -> 0.2; |0.2-0.1|, |0.1-0| -> 0.1; |0.2-0.2|, |0.2-0.8| -> 0.3
    torch.testing.assert_close(raw, torch.tensor([[0.2, 0.1, 0.3]]).double(), atol=1e-7, rtol=0)
    inside = red.deviation(ROWS, OTHER, SPAN, renormalise=True)
    # head 0: (.5,.25,.25) - (.25,.25,.5); head 1: (.25,.25,.5) - (0,0,1)
    torch.testing.assert_close(inside, torch.tensor([[0.25, 0.125, 0.375]]).double(), atol=1e-7, rtol=0)
    assert red.mass(ROWS, SPAN)[0, :, 0].tolist() == pytest.approx([0.8, 0.4])
    torch.testing.assert_close(red.density(ROWS, SPAN), torch.tensor([[0.25, 0.15, 0.2]]).double(), atol=1e-7, rtol=0)


def test_rows_that_do_not_reach_a_chunk_are_left_out() -> None:
    blind = ROWS.clone()
    blind[0, 1, 0, 1:4] = 0
    got = red.deviation(blind, blind.roll(0), SPAN, renormalise=True)
    torch.testing.assert_close(got, torch.zeros(1, 3).double())
    both = red.deviation(blind * 0, blind * 0, SPAN, renormalise=True)
    assert both.isnan().all()
    assert (red.deviation(blind * 0, blind * 0, SPAN, renormalise=False) == 0).all()


def test_retrieved_vectors_by_hand() -> None:
    # Two query heads share one KV head; values of the chunk's three tokens.
    values = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]]])
    got = red.retrieved(ROWS, values, SPAN)[0, :, 0]
    torch.testing.assert_close(got, torch.tensor([[0.8, 0.6], [0.5, 0.5]]).double(), atol=1e-7, rtol=0)
    reference = torch.tensor([[[[0.8, 0.6]], [[0.5, -0.5]]]]).double()
    layers, heads = red.retrieval_errors(got[None, :, None], reference)
    # Head 0 agrees; head 1 is off by (0, 1): its energy is 0.5, that of both 1.5.
    assert heads["nrmse"][0].tolist() == pytest.approx([0.0, math.sqrt(1 / 0.5)], abs=1e-6)
    assert float(layers["nrmse"][0]) == pytest.approx(math.sqrt(1 / 1.5))
    assert heads["cosine_distance"][0].tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    assert float(layers["cosine_distance"][0]) == pytest.approx(0.5)
    zero = torch.zeros_like(reference)
    assert red.retrieval_errors(zero, zero)[0]["nrmse"].isnan().all()


def test_query_heads_read_their_own_kv_head() -> None:
    rows = torch.zeros(1, 4, 1, 1)
    rows[..., 0] = 1
    values = torch.tensor([[[[1.0]], [[5.0]]]])
    assert red.retrieved(rows, values, (0, 1))[0, :, 0, 0].tolist() == [1, 1, 5, 5]


def test_angles_and_norms_by_hand() -> None:
    a = torch.tensor([[[[1.0, 0.0], [0.0, 2.0], [1.0, 1e-9]]]]).double()
    b = torch.tensor([[[[0.0, 3.0], [0.0, 1.0], [1.0, 0.0]]]]).double()
    assert red.angle(a, b)[0].tolist() == pytest.approx([math.pi / 2, 0.0, 1e-9], rel=1e-6)
    assert red.norm_ratio(a, b)[0].tolist() == pytest.approx([1 / 3, 2.0, 1.0])
    assert float(red.angle(a, -a)[0, 0]) == pytest.approx(math.pi)


def test_sink_densities_by_hand() -> None:
    # Ten tokens: the leading tenth is the first token, the middle is tokens 1 to 8.
    profile = torch.tensor([[9.0, *[1.0] * 8, 5.0]])
    got = red.sink_densities(profile)
    assert [float(got[name][0]) for name in ("first_token", "leading", "middle")] == pytest.approx([9, 9, 1])
    # Five tokens: the leading tenth is half of the first; the other half of it lies in the middle 80 % (4 tokens).
    got = red.sink_densities(torch.tensor([[9.0, 1.0, 1.0, 1.0, 5.0]]))
    want = (0.5 * 9 + 3 * 1 + 0.5 * 5) / 4
    assert [float(got[name][0]) for name in ("first_token", "leading", "middle")] == pytest.approx([9, 9, want])


def test_regions_by_hand() -> None:
    # Centres of four tokens: 1/8, 3/8, 5/8, 7/8.
    centre = red.region_weights(4, 0.2, "centre")
    assert centre.tolist() == [[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1]]
    overlap = red.region_weights(4, 0.2, "overlap")
    want = torch.tensor([[1, 0, 0, 0], [0.05, 0.25, 0.25, 0.05], [0, 0, 0, 1]]).double()
    torch.testing.assert_close(overlap, want / want.sum(1, keepdim=True))
    # With centres, a short chunk has no token in a narrow edge.
    assert red.region_weights(3, 0.1, "centre")[0].isnan().all()


# --- binning -------------------------------------------------------------------------------------------------------

LENGTHS, BINS = st.integers(1, 60), st.integers(1, 40)


@given(length=LENGTHS, bins=BINS, seed=st.integers(0, 99))
def test_overlap_bins_conserve_the_total(length: int, bins: int, seed: int) -> None:
    values = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)).double()
    weights = red.bin_weights(length, bins)
    assert weights.shape == (bins, length)
    torch.testing.assert_close(weights.sum(1), torch.ones(bins).double())
    binned = red.averaged(values, weights)
    # A bin is 1/bins of the chunk, so bins weighted by their width in tokens add up to the total.
    torch.testing.assert_close(binned.sum(-1) * length / bins, values.sum(-1))
    assert (binned >= values.min(-1, keepdim=True).values - 1e-12).all()
    assert (binned <= values.max(-1, keepdim=True).values + 1e-12).all()


@given(length=LENGTHS, bins=BINS, seed=st.integers(0, 99))
def test_centre_bins_count_every_token_once(length: int, bins: int, seed: int) -> None:
    values = torch.rand(length, generator=torch.Generator().manual_seed(seed)).double()
    binned = red.averaged(values, red.bin_weights(length, bins, "centre"))
    members = [[] for _ in range(bins)]
    for i in range(length):
        members[min(math.floor((i + 0.5) / length * bins + 1e-9), bins - 1)].append(float(values[i]))
    for got, inside in zip(binned.tolist(), members, strict=True):
        assert math.isnan(got) if not inside else got == pytest.approx(sum(inside) / len(inside))
    counted = sum(got * len(inside) for got, inside in zip(binned.tolist(), members, strict=True) if inside)
    assert counted == pytest.approx(float(values.sum()))


@given(length=LENGTHS, bins=BINS)
def test_overlap_is_what_a_fine_ruler_measures(length: int, bins: int) -> None:
    """Every token cut into `bins` equal slivers, which bins take whole: an independent way to the same weights."""
    slivers = torch.eye(length).double().repeat_interleave(bins, dim=0)  # [length * bins, length]
    want = slivers.reshape(bins, length, length).mean(dim=1)
    torch.testing.assert_close(red.bin_weights(length, bins), want, atol=1e-12, rtol=0)


@given(length=LENGTHS, bins=BINS, how=st.sampled_from(red.BINNINGS))
@settings(max_examples=50)
def test_a_chunk_read_backwards_gives_its_bins_backwards(length: int, bins: int, how: red.Binning) -> None:
    weights = red.bin_weights(length, bins, how)
    centres = [(i + 0.5) / length * bins for i in range(length)]
    assume(how == "overlap" or all(abs(c - round(c)) > 1e-9 for c in centres))  # on an edge, the right bin takes it
    torch.testing.assert_close(weights.flip(0, 1), weights, equal_nan=True)


@pytest.mark.parametrize("how", red.BINNINGS)
def test_documents_of_unequal_length_line_up(how: red.Binning) -> None:
    """The same function of relative position, sampled by 40 and by 200 tokens, gives nearly the same bins."""

    def sampled(length: int) -> Tensor:
        return torch.tensor([((i + 0.5) / length) ** 2 for i in range(length)])

    short, long = (red.averaged(sampled(n), red.bin_weights(n, 20, how)) for n in (40, 200))
    assert float((short - long).abs().max()) < 1e-3
    # By absolute position they would not.
    assert float((sampled(40) - sampled(200)[:40]).abs().max()) > 0.5


def test_wrong_options_are_named() -> None:
    with pytest.raises(InputError, match="bins=0"):
        red.bin_weights(4, 0)
    with pytest.raises(InputError, match=r"edge=0.5"):
        red.region_weights(4, 0.5)
    with pytest.raises(InputError, match="binning='middle'"):
        red.bin_weights(4, 2, "middle")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="0 tokens"):
        red.bin_weights(0, 2)
