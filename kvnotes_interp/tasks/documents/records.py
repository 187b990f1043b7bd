"""Questions from published files: reading JSON, JSON lines or parquet, locally or from the hub, and drawing from them.

A task brings its records into one form, `Record`; the rest is the same for all of them. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import read_json, read_json_lines
from kvnotes_interp.tasks.documents.question import SPLITS, Detail, Question, draw, make_key, whole_number
from kvnotes_interp.tasks.pair import Split

PREFIX = "Read the passages and answer the question in a few words.\n"


@dataclass(frozen=True)
class Record:
    """One published question.

    Args:
        content: cluster for intervals and unit of the split.
        passages: (title, text) in the order of the file. gold: indices of the supporting ones, all of them.
        aliases: other right answers.
    """

    id: str
    content: str
    question: str
    answer: str
    passages: tuple[tuple[str, str], ...]
    gold: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    details: tuple[tuple[str, Detail], ...] = ()


def part_of(content: str) -> Split:
    """The split of a content: a coin thrown by its hash, the same on every machine and for every file."""
    return SPLITS[hashlib.sha256(content.encode()).digest()[0] % 2]


def questions(
    family: str,
    records: Iterable[Record],
    *,
    n: int,
    seed: int,
    split: Split | None,
    documents: int | None,
) -> list[Question]:
    """Draw `n` questions. Contents are spread: none is used twice before all were used.

    Args:
        documents: passages per question: the supporting ones and others of the record, drawn at random, in the order of
            the file. Records with more supporting passages or fewer passages are left out. None: all of the record.

    Raises:
        InputError: a value is out of range, or no record fits.
    """
    if documents is not None:
        whole_number("documents", documents, least=1)
    fits: dict[str, list[Record]] = {part: [] for part in SPLITS}
    total = 0
    for record in records:
        total += 1
        if documents is None or len(record.gold) <= documents <= len(record.passages):
            fits[part_of(record.content)].append(record)
    if not any(fits[part] for part in SPLITS if split in (None, part)):
        raise InputError(
            f'Task "{family}": of {total} usable records in the file, none of split {split or "train or test"} has '
            f"{documents or 'any'} documents with all supporting ones among them. Choose another number of documents, "
            "another split or another file."
        )
    orders = {part: _spread(fits[part], Random(f"{family}|{seed}|{part}|order")) for part in SPLITS}
    if split is None and not all(orders.values()):  # a small file may hold contents of one split only
        split = next(part for part in SPLITS if orders[part])

    def make(rng: Random, part: Split, number: int) -> Question:
        order = orders[part]
        return _question(family, order[number % len(order)], part, rng, documents)

    return draw(family, make, n=n, seed=seed, split=split)


def _spread(records: Sequence[Record], rng: Random) -> list[Record]:
    """In random order, the first record of every content before the second of any."""
    seen: dict[str, int] = {}
    rank: list[tuple[int, int]] = []
    shuffled = rng.sample(list(records), len(records))
    for place, record in enumerate(shuffled):
        seen[record.content] = seen.get(record.content, 0) + 1
        rank.append((seen[record.content], place))
    return [shuffled[place] for _, place in sorted(rank)]


def _question(family: str, record: Record, part: Split, rng: Random, documents: int | None) -> Question:
    others = [i for i in range(len(record.passages)) if i not in record.gold]
    if documents is not None:
        others = rng.sample(others, documents - len(record.gold))
    kept = sorted((*record.gold, *others))
    texts = tuple(f"Title: {_flat(title)}. {_flat(text)}\n" for title, text in (record.passages[i] for i in kept))
    suffix = f"Question: {_flat(record.question)}\nAnswer:"
    return Question(
        family=family,
        key=make_key(family, *texts, suffix),
        content=f"{family}:{record.content}",
        split=part,
        prefix=PREFIX,
        documents=texts,
        suffix=suffix,
        answer=f" {_flat(record.answer)}",
        gold=tuple(kept.index(i) for i in record.gold),
        aliases=tuple(f" {_flat(alias)}" for alias in record.aliases),
        stops=("\n",),  # answers hold full stops of their own
        details=(("id", record.id), *record.details),
    )


def _flat(text: str) -> str:
    """On one line, single spaces: a newline ends a document and nothing else."""
    return " ".join(str(text).split())


# --- files -----------------------------------------------------------------------------------------------------------


def read_rows(family: str, file: str | Path) -> list[dict[str, Any]]:
    """Rows of a .json (a list), .jsonl or .parquet file. Raises InputError naming the file and what is wrong."""
    path = Path(file)
    if not path.is_file():
        raise InputError(f'Task "{family}": there is no file {path}.')
    what = f"{family} file"
    if path.suffix == ".parquet":
        from kvnotes_interp.results.tables import read_parquet

        return read_parquet(path).to_pylist()
    try:
        rows = read_json_lines(path, what, of=dict) if path.suffix == ".jsonl" else read_json(path, what, of=list)
    except InputError as error:
        form = path.suffix.lstrip(".") or "JSON"
        raise InputError(
            f"{path} is not {form} that can be read; it must hold a list of objects, one each: {error}"
        ) from error
    if wrong := [number for number, row in enumerate(rows) if not isinstance(row, dict)]:
        raise InputError(f"{path}, row {wrong[0]}: a {family} file must hold a list of objects, one per question.")
    return rows


def records_of(
    family: str, file: str | Path, read: Callable[[dict[str, Any]], Record | None], fields: Sequence[str]
) -> list[Record]:
    """Usable records of a file; `read` gives None for a row without a usable answer.

    Raises InputError for a row that lacks one of `fields`.
    """
    out = []
    for number, row in enumerate(read_rows(family, file)):
        missing = [field for field in fields if field not in row]
        if missing:
            raise InputError(
                f'{file}, row {number}: no "{missing[0]}". A {family} file holds {", ".join(fields)} in every row; '
                f"this one has {', '.join(list(row)[:8]) or 'nothing'}."
            )
        try:
            record = read(row)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(f"{file}, row {number}: not in the form of {family} ({error!r}).") from error
        if record is not None:
            out.append(record)
    return out


@lru_cache(maxsize=8)
def from_hub(family: str, repo: str, name: str, revision: str | None) -> str:
    """The local path of a file of a data set on the hub, downloaded once.

    Raises InputError when it cannot be had, saying which file to fetch by hand.
    """
    from huggingface_hub import errors, hf_hub_download

    from kvnotes_interp.sources import hub_reachable

    options: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    try:
        return hf_hub_download(repo, name, local_files_only=True, **options)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        pass
    by_hand = f'Give a local copy instead: file="...". It is {name} of https://huggingface.co/datasets/{repo}.'
    if not hub_reachable():
        raise InputError(
            f'Task "{family}": its file is not on this machine and the Hugging Face hub cannot be reached (or '
            f"HF_HUB_OFFLINE is set). {by_hand}"
        )
    try:
        return hf_hub_download(repo, name, **options)
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise InputError(f'Task "{family}": {name} of {repo} could not be fetched ({error}). {by_hand}') from error
