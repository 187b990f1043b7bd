"""Gated decisions as document questions: what must be decided follows from a signal and a rule that names it.

Texts, contents and splits are those of `tasks.gate_documents`. With `apart`, signal and rule stand in documents of
their own: compiled alone, neither can hold the conclusion, so whoever reads the joined caches has to draw it.
"""

from __future__ import annotations

from random import Random

from kvnotes_interp.tasks.documents.question import Question, make_key
from kvnotes_interp.tasks.gate_documents import gate_documents
from kvnotes_interp.tasks.pair import Pair, Split, pieces_of


def gated(
    *,
    n: int = 64,
    seed: int = 0,
    split: Split | None = None,
    documents: int = 3,
    lines: int = 4,
    apart: bool = True,
) -> list[Question]:
    """One side of each pair, old or new by its key, as a question: documents, request, decision.

    Args:
        documents, lines: number of logs and neutral lines in each, as in `gate_documents`.
        apart: cut the log of signal and rule between the two; the question then has one document more.

    Raises:
        InputError: a value is out of range.
    """
    pairs = gate_documents(n=n, seed=seed, split=split, documents=documents, lines=lines)
    return [_ask(pair, apart) for pair in pairs]


def _ask(pair: Pair, apart: bool) -> Question:
    new = Random(f"gated|{pair.key}").random() < 0.5
    right, wrong = (pair.answer_new, pair.answer_old) if new else (pair.answer_old, pair.answer_new)
    texts: list[str] = []
    gold: list[int] = []
    suffix, last, behind_rule = "", -1, False
    for piece in pieces_of(pair.new if new else pair.old):
        if piece.document < 0:
            suffix += piece.text
            continue
        begins_rule = apart and piece.region == "rule" and not behind_rule
        if piece.document != last or begins_rule:
            texts.append("")
        last, behind_rule = piece.document, piece.region == "rule"
        texts[-1] += piece.text
        if piece.region in ("field", "rule") and len(texts) - 1 not in gold:
            gold.append(len(texts) - 1)
    return Question(
        family="gated",
        key=make_key("gated", *texts, suffix),
        content=pair.content.replace("gate_documents", "gated", 1),
        split=pair.split,
        prefix="",
        documents=tuple(texts),
        suffix=suffix,
        answer=right,
        gold=tuple(gold),
        distractors=(wrong,),
        details=(("apart", int(apart)),),
    )
