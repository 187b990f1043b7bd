"""What survives compaction: does a compact cache still decide, and is it conclusions or facts that are kept?

Old and new prompt of a pair differ in one field. The caches of both, up to the decision text, are compacted; the
decision text is run on top. In a *derived* family the answer is a conclusion, written after the field while the prompt
was prefilled; in a *verbatim* family the field itself must be read. Beside the decision: how far an edit of the fact
reaches, which regions of the prompt feed the compact slots, what the decision attends to, and whether the conclusion
can still be read by a linear probe. (Notes, arXiv 2606.17107, for the pairs; Still, arXiv 2606.07878.)

What this does not prove: that a kept decision was kept as a *note*: the field's own slot may have been kept. Hence the
shares by region, and random slots among the compactors. Families differ in more than their kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvnotes_interp import attention
from kvnotes_interp.metrics import Competence
from kvnotes_interp.operators.eviction.compacted import Sliding
from kvnotes_interp.probes.compaction.decoding import decoded
from kvnotes_interp.probes.compaction.origins import Origins
from kvnotes_interp.probes.compaction.points import COMPACTORS, RATIOS, Compacting, points_of, trained
from kvnotes_interp.probes.compaction.survival_summary import summarise
from kvnotes_interp.probes.compaction.surviving import FULL, Surviving
from kvnotes_interp.probes.linear.features import Store
from kvnotes_interp.probes.making import Making
from kvnotes_interp.probes.measure import Case
from kvnotes_interp.probes.request import pairs_of, request_of, verb
from kvnotes_interp.probes.run import Session
from kvnotes_interp.results import Result
from kvnotes_interp.tasks import Pair

if TYPE_CHECKING:
    from pathlib import Path

    from kvnotes_interp.model import Model


@verb
def compaction_survival(
    model: Model,
    pairs: Iterable[Pair] | Pair,
    *,
    compactors: Sequence[str] = COMPACTORS,
    ratios: Sequence[float] = RATIOS,
    sliding: Sliding = "keep",
    wording: str = "override",
    draws: int = 2,
    seed: int = 0,
    min_gap: float = 0.25,
    min_gap_noise: float = 50.0,
    out: str | Path | None = None,
    resume: bool = False,
    memory_budget: int | None = None,
    progress: bool = True,
) -> Result:
    """Compact both caches of every competent pair, and ask what is left.

    Args:
        pairs: of one family or several; with derived and verbatim ones together the summary tells them apart.
        compactors, ratios, sliding: as in `compaction_quality`. Compactors that observe see the context alone.
        wording: of the erratum, see `operators.edits.erratum`.
        draws: shuffles of the labels per linear probe.
        seed: of random slots, folds, shuffles and the bootstrap. Other arguments as in `local_patching`.

    Rows (view, readout), for the site "full" (nothing compacted) and every NAME_RATIOx:
    "survival": s_old, s_new, gap, decided (both prompts get their own answer), decided_new.
    "compact_edit": recovery (on the scale of the full caches), effect (the change over the compacted old cache, on that
    scale: where nothing decides any more recovery stands half-way), correct. Column `edit`: "erratum" behind the
    compacted old cache; "field_edited", the field recomputed in the old cache and that compacted; "field_patched", the
    kept slots of the field taken from the new run, where slots are copies.
    "slots" (share, enrichment) and "attention" per region of the prompt; "decoded" (accuracy, shuffled).

    Raises ControlError when an identity of patching fails, when a budget of all slots does not decide as the full
    cache, or when shuffled labels are read; InputError on wrong options.
    """
    points = points_of(compactors, ratios)
    pairs = pairs_of("compaction_survival", pairs)
    attention.require(model.hf)
    competence, making, written = Competence(min_gap, min_gap_noise), Making(tail="suffix"), trained(points)
    options = {
        "compactors": list(dict.fromkeys(point.compactor.name for point in points)),
        "ratios": list(dict.fromkeys(point.ratio for point in points)),
        **({"adapters": written} if written else {}),
        "sliding": sliding,
        "wording": wording,
        "draws": draws,
        "seed": seed,
    }
    with Session(
        model,
        request_of("compaction_survival", model, pairs, {**options, **vars(competence)}),
        pairs,
        competence=competence,
        out=out,
        resume=resume,
        memory_budget=memory_budget,
        path="auto",
        progress=progress,
        making=making,
    ) as session:
        folder = session.folder
        if folder.complete:
            return folder.result()
        store = Store(None if folder.path is None else folder.path / "parts" / "activations")
        surviving = Surviving(Compacting(model, sliding, seed), points, wording, Origins(model, sliding))

        def measure(case: Case) -> pd.DataFrame:
            rows, hidden = surviving(case)
            store.put(case.pair.pair.key, hidden)
            return rows

        first, tried = session.run("survival", measure, cost=lambda _: 1)
        known = set(tried.loc[tried["competent"].astype(bool), "pair"])
        good = [pair for pair in session.encoded if pair.pair.key in known]
        families = dict.fromkeys(pair.pair.family for pair in good)
        arms = [{"site": FULL, "compactor": FULL, "ratio": 1.0}, *(point.about for point in points)]
        notes = []
        for family in families:
            own = [pair for pair in good if pair.pair.family == family]
            rows, why = decoded(store, own, arms, draws=draws, seed=seed)
            notes += [why] if why else []
            if not folder.done("decoded", family):
                folder.put("decoded", family, rows)
        frame = pd.concat([first, folder.stage("decoded", list(families))], ignore_index=True)
        names = [point.name for point in points]
        summary = summarise(frame, tried, model=model.name, points=names, draws=draws, seed=seed, notes=notes)
        return session.finish(frame, tried, summary)
