"""Causal scrubbing, false notes and dose-response: is it the conclusion in the note that decides?

The *note* is the top k downstream positions of the pair, ranked on the other half of the pairs; the *rest* is the field
and every other downstream position. All patches are cache patches (resample ablation from another prompt's run).

- same_note: the note from other pairs whose prompt has the *same* conclusion. If only the conclusion counts, nothing
  moves; `drift` is how far the score does move, as a share of the pair's gap.
- opposite_note: the note alone from the pair's other prompt (a false note in an otherwise consistent cache).
- opposite_note_other: the same from another pair's prompt of the opposite conclusion.
- opposite_rest: everything else from the pair's other prompt, the note kept.
- dose: the false note over k, from old to new and from new to old; `flip` is the rate at which it is followed. Only
  competent pairs count, and those do flip when everything is patched.

Beside each stand random downstream sets of the same size, patched from the same donors. A donor of another pair is
aligned by the anchors of the template, its keys turned to the positions that they take. (Notes, arXiv 2606.17107.)

What this does not prove: that the note holds nothing but the conclusion. Donors agree in much else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.probes.circuit.decide import Row, batches, cache_row, decide, table
from kvnotes_interp.probes.circuit.ranking import random_positions
from kvnotes_interp.probes.measure import Case, downstream_of, field_of
from kvnotes_interp.sites import Site
from kvnotes_interp.tasks import EncodedPair

DOSES = (1, 2, 4, 8, 16, 32)
Donor = tuple[EncodedPair, str]
"""A pair and the side of it, "old" or "new", whose prompt is run."""


def doses(n: int) -> list[int]:
    """The k at which the dose is measured: powers of two below `n`, and `n` itself."""
    return [*(k for k in DOSES if k < n), n] if n else []


def choose_donors(pair: EncodedPair, others: Sequence[EncodedPair], answer: int, *, n: int, seed: int) -> list[Donor]:
    """Up to `n` runs of other pairs of this family that end in `answer`, one per content as far as they go.

    Pairs of this pair's own content come last: they share its field.
    """
    runs: dict[str, list[Donor]] = {}
    for other in others:
        if other.pair.key == pair.pair.key or other.pair.family != pair.pair.family:
            continue
        for side, found in (("old", other.answer_old_id), ("new", other.answer_new_id)):
            if found == answer:
                runs.setdefault(other.pair.content, []).append((other, side))
    order = random_positions(range(len(runs)), key=f"{seed}:donors:{pair.pair.key}")
    contents = [sorted(runs)[i] for i in order]
    contents.sort(key=lambda content: content == pair.pair.content)
    queues = [runs[content] for content in contents]
    dealt = [q[i] for i in range(max(map(len, queues), default=0)) for q in queues if i < len(q)]
    return dealt[:n]


def aligned(donor: KVCache, base: KVCache, slots: Mapping[int, int]) -> KVCache:
    """A cache of the base's size that holds, at slot p, the donor's slot `slots[p]`, its key turned to p's position.

    Slots that are not named hold whatever the donor has there and must not be patched.
    """
    index = torch.arange(len(base)).clamp(max=len(donor) - 1)
    for to, come in slots.items():
        index[to] = come
    return donor.take(index).placed(base.positions)


def slots_of(pair: EncodedPair, other: EncodedPair, where: Sequence[int]) -> dict[int, int] | None:
    """Where `other` has the anchors that `pair` has at `where`; None when it lacks one."""
    places = {anchor: p for p, anchor in enumerate(other.anchors) if p < other.length - 1}
    found = {p: places.get(pair.anchors[p]) for p in where}
    return None if None in found.values() else found  # type: ignore[return-value]


def measure_scrub(
    case: Case, ranked: Sequence[int], others: Sequence[EncodedPair], *, k: int, donors: int, draws: int, seed: int
) -> pd.DataFrame:
    """All scrubbing arms of one pair; `ranked` are its downstream positions, the best first."""
    note = tuple(sorted(ranked[:k]))
    everything = field_of(case.pair) + downstream_of(case.pair)
    rest = tuple(p for p in everything if p not in note)
    sets = {"note": note} | {f"random:{d}": s for d, s in enumerate(_random_sets(case, len(note), draws, seed))}
    about = {"view": "scrub", "site": "opposite_rest", "ranking": "other_half", "size": len(rest)}
    cells = [(about, Row(case.base, (Site(rest), case.donor)))]
    cells += [(_about("opposite_note", n, len(note)), Row(case.base, (Site(s), case.donor))) for n, s in sets.items()]
    drawn: list[tuple[str, int, Donor]] = []
    for arm, answer in (("same_note", case.answers[0]), ("opposite_note_other", case.answers[1])):
        # Some donors lack an anchor of the note, so more are drawn than are used.
        found = choose_donors(case.pair, others, answer, n=4 * donors, seed=seed)
        usable = [donor for donor in found if slots_of(case.pair, donor[0], note) is not None]
        drawn += [(arm, place, donor) for place, donor in enumerate(usable[:donors])]
    for (arm, place, (other, _)), run in zip(drawn, _prefilled(case, [d for _, _, d in drawn]), strict=True):
        found = {name: slots_of(case.pair, other, s) for name, s in sets.items()}
        there = {name: slots for name, slots in found.items() if slots is not None}
        donor = aligned(run, case.base, {p: q for slots in there.values() for p, q in slots.items()})
        cells += [
            (_about(arm, name, len(note), place), Row(case.base, (Site(tuple(slots)), donor)))
            for name, slots in there.items()
        ]
    found = decide(case, [row for _, row in cells])
    made = table(case, [(about, score) for (about, _), score in zip(cells, found, strict=True)])
    moved = made[(made["readout"] == "recovery") & (made["site"] == "same_note")]
    return pd.concat([made, moved.assign(readout="drift", value=moved["value"].abs())], ignore_index=True)


def _prefilled(case: Case, donors: Sequence[Donor]) -> list[KVCache]:
    """The runs of these donors up to their decision token; prompts of one length share a pass."""
    prompts = [(pair.old_ids if side == "old" else pair.new_ids)[:-1] for pair, side in donors]
    out: dict[int, KVCache] = {}
    for length in sorted({len(ids) for ids in prompts}):
        where = [i for i, ids in enumerate(prompts) if len(ids) == length]
        for chunk in batches(case, where, n_pos=0, n_tail=length):
            run = engine.prefill(case.model, [list(prompts[i]) for i in chunk])
            out |= {i: cache_row(run, row) for row, i in enumerate(chunk)}
    return [out[i] for i in range(len(prompts))]


def _about(arm: str, name: str, size: int, donor: int = 0) -> dict[str, Any]:
    """`draw` counts random sets and donors together: per pair, all draws are averaged."""
    which, _, draw = name.partition(":")
    ranking = "other_half" if which == "note" else "random"
    return {"view": "scrub", "site": arm, "ranking": ranking, "size": size, "draw": 100 * donor + int(draw or 0)}


def _random_sets(case: Case, k: int, draws: int, seed: int) -> Iterator[tuple[int, ...]]:
    where = downstream_of(case.pair)
    for draw in range(draws if k < len(where) else 0):
        yield tuple(sorted(random_positions(where, key=f"{seed}:note:{draw}:{case.pair.pair.key}")[:k]))


def measure_dose(case: Case, ranked: Sequence[int], *, draws: int, seed: int) -> pd.DataFrame:
    """The false note over k, both ways: new notes in the old cache (`to_new`), old notes in the new cache (`to_old`).

    Either way recovery is 0 for the cache it started from and 1 for the other prompt's decision, and `flip` is 1 where
    the note is followed.
    """
    where = downstream_of(case.pair)
    orders = {("other_half", 0): list(ranked)}
    for draw in range(draws):
        orders["random", draw] = random_positions(where, key=f"{seed}:dose:{draw}:{case.pair.pair.key}")
    cells = [
        ({"view": "dose", "ranking": which, "draw": draw, "k": k, "size": k}, Site(tuple(order[:k])))
        for (which, draw), order in orders.items()
        for k in doses(len(where))
    ]
    out = []
    for side, base, donor in (("new", case.base, case.donor), ("old", case.donor, case.base)):
        scores = case.scores([site for _, site in cells], base=base, donor=donor)
        scored = [({**about, "site": f"to_{side}"}, s) for (about, _), s in zip(cells, scores, strict=True)]
        out.append(table(case, scored, toward=side))
    return pd.concat(out, ignore_index=True)


def count(n_downstream: int, *, donors: int, draws: int) -> tuple[int, int]:
    """Decisions that scrubbing and dose-response read for a pair with this many downstream positions."""
    return 2 + draws + 2 * donors * (1 + draws), 2 * (1 + draws) * len(doses(n_downstream))
