"""Edits with a chain of thought: the model writes some tokens before the decision text, and may read the field again.

The cache of an edit is cut before its decision text; a cue and up to `budget` tokens are written on top of it; then the
decision text is run and the same two answers are scored. The text itself is read too: which answer it names last.
(Notes, arXiv 2606.17107, editing with and without chain of thought.)

What this does not prove: that what was written is the reason for the decision.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from unicodedata import east_asian_width

from kvnotes_interp import engine, metrics
from kvnotes_interp.operators import edits as library
from kvnotes_interp.probes.measure import Case

CUE = " Let us think step by step."
EDITS = ("stale", "field_only", "oracle", "erratum", "field_erratum")


def thought_rows(
    case: Case, setting: library.Setting, *, budget: int, wording: str, temperature: float, seed: int
) -> list[dict[str, Any]]:
    """Rows of view "thought" for each of EDITS: recovery, correct, the written answer, and tokens."""
    out: list[dict[str, Any]] = []
    decision = list(setting.pair.old_ids[setting.decision_start : setting.stop])
    cue = [int(i) for i in case.model.tokenizer(CUE, add_special_tokens=False)["input_ids"]]
    for name in EDITS:
        made = library.find(name)(setting, **({"wording": wording} if "erratum" in name else {}))
        before = made.cache[: len(made.cache) - len(decision)]
        said = engine.decode(
            case.model, before, cue, max_new_tokens=budget, temperature=temperature, seed=seed, stop=_ends(case)
        )
        # The last token written has not been run yet; an end-of-text token is not kept.
        kept = [t for t in said.token_ids[-1:] if t not in _ends(case)]
        run = [*kept, *decision]
        cache = engine.extend(case.model, said.cache, run)[0] if run else said.cache
        low, high = engine.decide(case.model, cache, case.tail, case.answers)[0].tolist()
        score = high - low
        named = named_last(said.text, setting.pair.pair.answer_old, setting.pair.pair.answer_new)
        values = {
            "logit_diff": score,
            "recovery": metrics.recovery(score, old=case.old, new=case.new),
            "correct": float(score > 0),
            "names_an_answer": float(named is not None),
            "names_the_new_answer": float(named == "new"),
            "thought_tokens": float(len(said.token_ids)),
            "layer_tokens": made.layer_tokens
            + float((len(cue) + len(said.token_ids) + len(decision)) * cache.n_layers),
        }
        about = {"view": "thought", "site": name, "option": f"{budget} tokens", "part": "kv"}
        out += [{**case.names, **about, "readout": readout, "value": value} for readout, value in values.items()]
    return out


def named_last(text: str, old: str, new: str) -> str | None:
    """Which answer a text names last, as whole words: "old", "new", or None."""
    places = {
        name: max((m.start() for m in re.finditer(_whole(answer.strip()), text, re.IGNORECASE)), default=-1)
        for name, answer in (("old", old), ("new", new))
    }
    best = max(places, key=places.__getitem__)
    return best if places[best] >= 0 and places["old"] != places["new"] else None


def _whole(answer: str) -> str:
    """A pattern for the answer as a whole word; scripts that set no spaces have no edges of words."""
    edges = [re.match(r"\w", c) is not None and east_asian_width(c) not in "WF" for c in (answer[0], answer[-1])]
    return (r"(?<!\w)" if edges[0] else "") + re.escape(answer) + (r"(?!\w)" if edges[1] else "")


def _ends(case: Case) -> Sequence[int]:
    return case.model.stop_ids
