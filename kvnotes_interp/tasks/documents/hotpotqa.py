"""HotpotQA: questions that need two Wikipedia paragraphs. (Yang et al. 2018; CC BY-SA 4.0, not part of this package.)

Both public forms are read: the original JSON (`_id`, `context` as [title, sentences] pairs, `supporting_facts` as
[title, sentence] pairs) and the hub's parquet (`id`, both as lists by name).
"""

from __future__ import annotations

from typing import Any, Literal

from kvnotes_interp.errors import InputError
from kvnotes_interp.tasks.documents.question import Question
from kvnotes_interp.tasks.documents.records import Record, from_hub, questions, records_of
from kvnotes_interp.tasks.pair import Split

REPO = "hotpotqa/hotpot_qa"
SETTINGS = ("distractor", "fullwiki")
FIELDS = ("question", "answer", "context", "supporting_facts")


def hotpotqa(
    *,
    n: int = 64,
    seed: int = 0,
    split: Split | None = None,
    file: str | None = None,
    documents: int | None = None,
    setting: Literal["distractor", "fullwiki"] = "distractor",
    revision: str | None = None,
) -> list[Question]:
    """Questions of a HotpotQA file whose supporting paragraphs are all given. Content and split are by question.

    Both splits are drawn from the one file: its own split (train, validation) is the choice of file.

    Args:
        file: a local .json, .jsonl or .parquet file; None fetches the validation file of `setting` from the hub.
        documents: paragraphs per question; None: all that the file gives (ten).
        setting, revision: which validation file of the hub, and at which commit.

    Raises:
        InputError: no such file and no hub, a file of another form, or too few questions that fit.
    """
    if setting not in SETTINGS:
        raise InputError(f'setting is "{setting}"; it must be one of {", ".join(SETTINGS)}.')
    path = file or from_hub("hotpotqa", REPO, f"{setting}/validation-00000-of-00001.parquet", revision)
    records = records_of("hotpotqa", path, _record, FIELDS)
    return questions("hotpotqa", records, n=n, seed=seed, split=split, documents=documents)


def _record(row: dict[str, Any]) -> Record | None:
    context, facts = row["context"], row["supporting_facts"]
    if isinstance(context, dict):  # the hub: lists by name
        context = list(zip(context["title"], context["sentences"], strict=True))
        facts = list(zip(facts["title"], facts["sent_id"], strict=True))
    passages = tuple((str(title), " ".join(s.strip() for s in sentences)) for title, sentences in context)
    titles = [title for title, _ in passages]
    wanted = list(dict.fromkeys(str(title) for title, _ in facts))
    answer = str(row["answer"] or "").strip()
    if not answer or not wanted or not set(wanted) <= set(titles):
        return None  # a test file without answers, or (fullwiki) a supporting paragraph that was not retrieved
    name = str(row.get("_id") or row["id"])
    details = tuple((key, str(row[key])) for key in ("type", "level") if row.get(key))
    return Record(
        id=name,
        content=name,
        question=row["question"],
        answer=answer,
        passages=passages,
        gold=tuple(sorted(titles.index(title) for title in wanted)),
        details=details,
    )
