"""The Perceiver of one layer: keys and values of a context in, those of a few latents out. (Still, arXiv 2606.07878.)

What goes in, per KV head and slot, is x = [key without rotation ; value], of width 2 d_head. t latents stand at equal
distances over the source. A block is

    z = z + O V A x          cross-attention to the whole cache (the first block has no z yet: a latent starts empty)
    z = z + O' V' A' z       self-attention among the latents
    z = z + D gelu(U n(z))   feed-forward, an option

and two heads give each latent's key and value. Queries and attention keys are normed and turned by a rotary embedding
of the Perceiver's own, in units of the latents' distance, so that the same weights serve any t. The values of an
attention are *not* normed: a norm would take the scale of every key and value away, and no identity could be had.
Keys and values are normed apart, since in some models the ones are many times the size of the others.

Identity. At the start V, O of the first block and the heads copy, every other O and D is zero, and the first
cross-attention sees position alone: its score is -32 log(1 + d^2), d the distance in latents' distances. With as many
latents as slots a latent then takes 4.7e-10 of its weight from elsewhere; at ratio r it is a mean over the slots within
about r/8 of its place. The tail is a power law, and each part of the score is learned, so that content can win over
distance: an exponential one would close all but the neighbourhood to the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvnotes_interp.operators.still.settings import StillSettings

FALL = 32.0  # exponent at which the first cross-attention falls off with distance
THETA = 10_000.0  # base of the Perceiver's own rotary frequencies
EPS = 1e-6  # of the norms
Trace = list[tuple[Tensor, Tensor, Tensor]]
"""Of every attention, cross and among the latents in turn: its weights, the latents before it, and what it wrote."""


@dataclass(frozen=True)
class Frame:
    """Where slots and latents stand, in units of the distance between latents; `lead` broadcasts to batch, kv_head.

    Attributes:
        slots, latents: places. slot_turn, latent_turn: cosines and sines of the rotary embedding `[2 ... pos d_head]`.
        seen: which slots there are; None for all (a batch is padded).
    """

    slots: Float[Tensor, "*lead slot"]
    latents: Float[Tensor, "*lead latent"]
    slot_turn: Float[Tensor, "2 *lead slot d_head"]
    latent_turn: Float[Tensor, "2 *lead latent d_head"]
    seen: Bool[Tensor, "*lead slot"] | None

    @classmethod
    def of(
        cls,
        positions: Int[Tensor, "*lead slot"],
        latents: Float[Tensor, "*lead latent"],
        seen: Bool[Tensor, "*lead slot"] | None,
        *,
        d_head: int,
        like: Tensor,
    ) -> Frame:
        """The frame of slots and latents at these positions (in tokens, float64), on the device and dtype of `like`."""
        first = latents[..., :1]
        spacing = (latents[..., 1:2] - first).clamp_min(1e-9) if latents.shape[-1] > 1 else _reach(positions, seen)
        places = [(positions - first) / spacing, (latents - first) / spacing]
        frequencies = THETA ** (-torch.arange(d_head, dtype=torch.float64) / d_head)
        angles = [place[..., None] * frequencies for place in places]
        turns = [torch.stack((angle.cos(), angle.sin())) for angle in angles]
        slots, latents, *turns = (t.to(like) for t in (*places, *turns))
        return cls(slots, latents, turns[0], turns[1], None if seen is None else seen.to(like.device))


def _reach(positions: Tensor, seen: Tensor | None) -> Tensor:
    """The span of the positions: the unit where a single latent has no distance to another."""
    low, high = span(positions, seen)
    return (high - low).clamp_min(1.0)


def span(
    positions: Int[Tensor, "*lead slot"], seen: Bool[Tensor, "*lead slot"] | None
) -> tuple[Float[Tensor, "*lead 1"], Float[Tensor, "*lead 1"]]:
    """First and last position that is there, in float64."""
    low = high = positions.double()
    if seen is not None:
        low, high = low.masked_fill(~seen, math.inf), high.masked_fill(~seen, -math.inf)
    return low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)


class Projection(nn.Module):
    """A matrix per head (or one for all): `[... head pos d_in] -> [... head pos d_out]`, no bias."""

    def __init__(self, weight: Float[Tensor, "head d_in d_out"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (
            self.weight[0] if len(self.weight) == 1 else self.weight
        )  # one matrix is faster than a batch of one


class Norm(nn.Module):
    """RMS norm of the key half and the value half, each for itself."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        halves = x.unflatten(-1, (2, -1))
        return (halves * (halves.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(-2) * self.weight


def turned(x: Float[Tensor, "*lead pos width"], turn: Float[Tensor, "2 *lead pos half"]) -> Tensor:
    """Each vector turned by its place: first and second half of the width are paired."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """One head: normed queries and keys, values as they are. Without `q` the queries are taken as they come."""

    def __init__(self, q: Projection | None, k: Projection, v: Projection, o: Projection) -> None:
        super().__init__()
        heads, width = k.weight.shape[:2]
        self.q, self.k, self.v, self.o = q, k, v, o
        self.query_norm = None if q is None else Norm(heads, width)
        self.key_norm = Norm(heads, width)

    def weights(
        self, query: Tensor, keys: Tensor, turns: tuple[Tensor, Tensor], score: Tensor | None
    ) -> Float[Tensor, "batch kv_head latent slot"]:
        """Where the latents look; `score` is added to the logits."""
        if self.q is not None and self.query_norm is not None:
            query = self.q(self.query_norm(query))
        query, key = turned(query, turns[0]), turned(self.k(self.key_norm(keys)), turns[1])
        logits = query @ key.mT * key.shape[-1] ** -0.5
        return (logits if score is None else logits + score).softmax(-1)

    def write(self, weights: Tensor, x: Tensor) -> Float[Tensor, "batch kv_head latent width"]:
        """What the attention adds to the latents."""
        return self.o(self.v(weights @ x))


class Block(nn.Module):
    """Cross-attention, self-attention and, as an option, a feed-forward network."""

    def __init__(self, draw: Draw, *, first: bool, feed_forward: bool) -> None:
        super().__init__()
        square, zeros = draw.square, draw.zeros
        if first:  # no key projection yet: the first scores are those of position alone
            self.cross = Attention(None, zeros(), draw.eye(), draw.eye())
        else:
            self.cross = Attention(square(), square(), square(), zeros())
        self.own = Attention(square(), square(), square(), zeros())
        self.feed = Feed(draw) if feed_forward else None


class Feed(nn.Module):
    """Two layers, four times as wide inside."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.norm = Norm(draw.heads, draw.width)
        self.up, self.down = draw.square(out=4), draw.zeros(inner=4)

    def forward(self, z: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(z))))


@dataclass(frozen=True)
class Draw:
    """Draws the matrices of a Perceiver: zeros and identities, or everything at random for init="plain"."""

    heads: int
    width: int
    plain: bool
    generator: torch.Generator

    def square(self, *, inner: int = 1, out: int = 1) -> Projection:
        """Normal, so that the size of what comes in is kept."""
        shape = (self.heads, inner * self.width, out * self.width)
        return Projection(torch.randn(shape, generator=self.generator) * shape[1] ** -0.5)

    def zeros(self, *, inner: int = 1) -> Projection:
        """Zeros, or as `square`."""
        if self.plain:
            return self.square(inner=inner)
        return Projection(torch.zeros(self.heads, inner * self.width, self.width))

    def eye(self) -> Projection:
        """The identity, or as `square`."""
        return self.square() if self.plain else Projection(torch.eye(self.width).repeat(self.heads, 1, 1))

    def half(self, first: int) -> Projection:
        """Takes the half that begins at `first` out, or is drawn."""
        whole = self.eye().weight.detach()
        return Projection(whole[..., first : first + self.width // 2].clone())


class Perceiver(nn.Module):
    """The compactor of one layer.

    Args:
        d_head: of the cached keys and values. heads: sets of weights, 1 or the number of KV heads.
        generator: what is drawn comes from it.
    """

    def __init__(self, d_head: int, heads: int, settings: StillSettings, generator: torch.Generator) -> None:
        super().__init__()
        width = 2 * d_head
        draw = Draw(heads, width, settings.init == "plain", generator)
        self.query = nn.Parameter(torch.randn(heads, settings.queries, width, generator=generator))
        self.fall = nn.Parameter(torch.zeros(heads, 1, 1) if draw.plain else torch.ones(heads, 1, 1))
        blocks = [Block(draw, first=i == 0, feed_forward=settings.feed_forward) for i in range(settings.blocks)]
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = Norm(heads, width) if settings.final_norm else None
        self.key_head, self.value_head = draw.half(0), draw.half(d_head)
        self.bias_head = Projection(torch.zeros(heads, width, 1)) if settings.bias else None

    def forward(
        self,
        x: Float[Tensor, "batch kv_head slot width"],
        frame: Frame,
        bias: Float[Tensor, "batch kv_head slot"] | None = None,
        trace: Trace | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys `[batch kv_head latent d_head]` without rotation, values alike, and biases `[batch kv_head latent]`.

        `bias` is the one that the slots carry: it is added to the scores of the cross-attentions, and its mean under
        the first one goes on to the latents. `trace` collects what the attentions do.
        """
        z, carried = self.latents(x, frame, bias, trace)
        z = z if self.final_norm is None else self.final_norm(z)
        out = None
        if self.bias_head is not None:
            out = self.bias_head(z)[..., 0] + (0.0 if carried is None else carried)
        return self.key_head(z), self.value_head(z), out

    def latents(
        self, x: Tensor, frame: Frame, bias: Tensor | None, trace: Trace | None
    ) -> tuple[Float[Tensor, "batch kv_head latent width"], Tensor | None]:
        """The latents behind the last block, and the bias they carry from the slots."""
        given = None if bias is None else bias[..., None, :]
        if frame.seen is not None:
            hidden = torch.zeros_like(frame.seen, dtype=x.dtype).masked_fill(~frame.seen, -math.inf)[..., None, :]
            given = hidden if given is None else given + hidden
        away = FALL * torch.log1p((frame.latents[..., :, None] - frame.slots[..., None, :]).square())
        score = -self.fall * away if given is None else given - self.fall * away
        carried, z = None, None
        across, among = (frame.latent_turn, frame.slot_turn), (frame.latent_turn, frame.latent_turn)
        for block in cast(list[Block], list(self.blocks)):
            if z is None:
                weights = block.cross.weights(self._queries(frame), x, across, score)
                carried = None if bias is None else (weights @ bias[..., None])[..., 0]
                write = block.cross.write(weights, x)
                z = torch.zeros_like(write)
            else:
                weights = block.cross.weights(z, x, across, given)
                write = block.cross.write(weights, x)
            if trace is not None:
                trace.append((weights, z, write))
            z = z + write
            weights = block.own.weights(z, z, among, None)
            write = block.own.write(weights, z)
            if trace is not None:
                trace.append((weights, z, write))
            z = z + write
            z = z if block.feed is None else z + block.feed(z)
        assert z is not None
        return z, carried

    def _queries(self, frame: Frame) -> Float[Tensor, "*head latent width"]:
        """The learned queries at the latents' places: between two of them, the mean that the distances give."""
        n, t = self.query.shape[1], frame.latents.shape[-1]
        if n == 1:
            return self.query.expand(-1, t, -1)
        place = torch.linspace(0, n - 1, t, dtype=self.query.dtype, device=self.query.device)
        low = place.floor().long().clamp_max(n - 2)
        part = (place - low)[:, None]
        return self.query[:, low] * (1 - part) + self.query[:, low + 1] * part
