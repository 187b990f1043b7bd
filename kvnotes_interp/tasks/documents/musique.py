"""MuSiQue: questions composed of two to four single steps. (Trivedi et al. 2022; CC BY 4.0, not part of this package.)

The public JSON lines are read: `paragraphs` with `is_supporting`, `answer`, `answer_aliases`, `answerable`.
"""

from __future__ import annotations

from typing import Any

from kvnotes_interp.tasks.documents.question import Question
from kvnotes_interp.tasks.documents.records import Record, from_hub, questions, records_of
from kvnotes_interp.tasks.pair import Split

REPO = "dgslibisey/MuSiQue"
NAME = "musique_ans_v1.0_dev.jsonl"
FIELDS = ("id", "question", "answer", "paragraphs")


def musique(
    *,
    n: int = 64,
    seed: int = 0,
    split: Split | None = None,
    file: str | None = None,
    documents: int | None = None,
    hops: int | None = None,
    revision: str | None = None,
) -> list[Question]:
    """Answerable questions of a MuSiQue file. Content and split are by the last single step, which gives the answer.

    Both splits are drawn from the one file: its own split (train, dev) is the choice of file.

    Args:
        file: a local .jsonl, .json or .parquet file; None fetches the dev file from the hub.
        documents: paragraphs per question; None: all that the file gives (twenty).
        hops: only questions of this many steps (2, 3 or 4).
        revision: commit of the hub's file.

    Raises:
        InputError: no such file and no hub, a file of another form, or too few questions that fit.
    """
    path = file or from_hub("musique", REPO, NAME, revision)
    records = records_of("musique", path, _record, FIELDS)
    if hops is not None:
        records = [record for record in records if dict(record.details)["hops"] == hops]
    return questions("musique", records, n=n, seed=seed, split=split, documents=documents)


def _record(row: dict[str, Any]) -> Record | None:
    paragraphs = row["paragraphs"]
    gold = tuple(i for i, paragraph in enumerate(paragraphs) if paragraph["is_supporting"])
    answer = str(row["answer"] or "").strip()
    if not row.get("answerable", True) or not gold or not answer:
        return None
    # "2hop__460946_294723", "4hop1__...": the steps' own numbers behind the underscores, the last one last.
    steps = str(row["id"]).split("__", 1)[-1].split("_")
    aliases = tuple(str(alias) for alias in row.get("answer_aliases") or () if str(alias).strip() != answer)
    return Record(
        id=str(row["id"]),
        content=steps[-1],
        question=row["question"],
        answer=answer,
        passages=tuple((str(p["title"]), str(p["paragraph_text"])) for p in paragraphs),
        gold=gold,
        aliases=aliases,
        details=(("hops", len(steps)),),
    )
