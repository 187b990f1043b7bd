"""HotpotQA and MuSiQue from small files in their public forms, written here by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import cut_texts
from kvnotes_interp.tasks import documents
from kvnotes_interp.tasks.documents import records
from tests.tiny_tokenizer import train

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Delhi", "Paris", "Tokyo", "Quito"]


def hotpot(i: int) -> dict[str, Any]:
    """In the original JSON's form; the second fact names the same paragraph twice."""
    town = CITIES[i % len(CITIES)]
    return {
        "_id": f"5a{i:022x}",
        "question": f"In which town was the author of Book {i}  born?",
        "answer": f"St. {town}",
        "type": "bridge" if i % 2 else "comparison",
        "level": "hard",
        "supporting_facts": [[f"Book {i}", 0], [f"Author {i}", 0], [f"Author {i}", 1]],
        "context": [
            ["Bread", ["Bread is baked.", " It is old."]],
            [f"Author {i}", [f"Author {i} wrote.\n", f" They were born in St. {town}."]],
            ["Milk", ["Milk is white."]],
            [f"Book {i}", [f"Book {i} is by Author {i}."]],
            ["Salt", ["Salt is salty."]],
        ],
    }


def musique(i: int) -> dict[str, Any]:
    supporting = {1, 3}
    return {
        "id": f"2hop__{100 + i}_{200 + i // 2}",  # two questions share their last step
        "question": f"Who is the spouse of the performer of Song {i}?",
        "answer": f"Person {i // 2}",
        "answer_aliases": [f"P. {i // 2}", f"Person {i // 2}"],
        "answerable": True,
        "question_decomposition": [],
        "paragraphs": [
            {"idx": j, "title": f"Page {i}.{j}", "paragraph_text": f"Words {i}\n{j}.", "is_supporting": j in supporting}
            for j in range(6)
        ],
    }


@pytest.fixture
def hotpot_file(tmp_path: Path) -> str:
    path = tmp_path / "hotpot_dev_distractor_v1.json"
    unusable = hotpot(99) | {"supporting_facts": [["Not retrieved", 0]]}
    path.write_text(json.dumps([hotpot(i) for i in range(40)] + [unusable]))
    return str(path)


@pytest.fixture
def musique_file(tmp_path: Path) -> str:
    path = tmp_path / "musique_ans_v1.0_dev.jsonl"
    rows = [*map(musique, range(60)), musique(98) | {"answerable": False}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return str(path)


def test_they_are_named_beside_the_tasks_made_on_the_spot() -> None:
    assert documents.names_from_files() == ("hotpotqa", "musique")
    assert not set(documents.names_from_files()) & set(documents.names())
    assert documents.options("musique") == {"file": None, "documents": None, "hops": None, "revision": None}
    with pytest.raises(InputError, match=r'no document task "hotpot".*"hotpotqa"'):
        documents.load("hotpot")
    with pytest.raises(InputError, match=r'no option "fil".*"file"'):
        documents.load("hotpotqa", fil="x")


def test_a_hotpotqa_question_is_the_row_it_came_from(hotpot_file: str) -> None:
    questions = documents.load("hotpotqa", n=40, file=hotpot_file)
    by_id = {q.detail("id"): q for q in questions}
    assert len(by_id) == 40, "every usable row once, the one without its supporting paragraph never"
    q = by_id[hotpot(7)["_id"]]
    assert q.documents[1] == "Title: Author 7. Author 7 wrote. They were born in St. Quito.\n"
    assert q.documents[0] == "Title: Bread. Bread is baked. It is old.\n"
    assert q.gold == (1, 3)
    assert q.suffix == "Question: In which town was the author of Book 7 born?\nAnswer:"
    assert q.answer == " St. Quito"
    assert (q.detail("type"), q.detail("level")) == ("bridge", "hard")
    assert q.stops == ("\n",), "the answer holds a full stop"
    assert len({q.key for q in questions}) == 40


def test_the_hubs_parquet_gives_the_same_questions(hotpot_file: str, tmp_path: Path) -> None:
    rows = []
    for i in range(40):
        row = hotpot(i)
        names = {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]}
        facts = {"title": [t for t, _ in row["supporting_facts"]], "sent_id": [s for _, s in row["supporting_facts"]]}
        rows.append({**row, "id": row["_id"], "context": names, "supporting_facts": facts})
    path = tmp_path / "validation.parquet"
    pd.DataFrame(rows).drop(columns="_id").to_parquet(path)
    assert documents.load("hotpotqa", n=40, file=str(path)) == documents.load("hotpotqa", n=40, file=hotpot_file)


def test_a_musique_question_is_the_row_it_came_from(musique_file: str) -> None:
    questions = documents.load("musique", n=60, file=musique_file)
    by_id = {q.detail("id"): q for q in questions}
    assert len(by_id) == 60, "the unanswerable one is left out"
    q = by_id["2hop__109_204"]
    assert q.documents[3] == "Title: Page 9.3. Words 9 3.\n"
    assert (q.gold, q.answer, q.aliases) == ((1, 3), " Person 4", (" P. 4",))
    assert (q.content, q.detail("hops")) == ("musique:204", 2)
    assert {by_id["2hop__108_204"].split} == {q.split}, "questions that share the last step are in one split"
    contents = [q.content for q in documents.load("musique", n=30, file=musique_file, split="train")]
    first = contents[: len(set(contents))]
    assert len(set(first)) == len(first), "no content comes twice before all came once"


@pytest.mark.parametrize("name", ["hotpotqa", "musique"])
def test_seed_split_and_documents(name: str, hotpot_file: str, musique_file: str) -> None:
    file = hotpot_file if name == "hotpotqa" else musique_file
    whole = documents.load(name, n=20, seed=3, file=file, documents=3)
    assert documents.load(name, n=20, seed=3, file=file, documents=3) == whole
    assert documents.load(name, n=8, seed=3, file=file, documents=3) == whole[:8]
    assert documents.load(name, n=20, seed=4, file=file, documents=3) != whole
    parts = {part: documents.load(name, n=10, file=file, split=part) for part in ("train", "test")}
    assert not {q.content for q in parts["train"]} & {q.content for q in parts["test"]}
    full = {q.detail("id"): q for q in documents.load(name, n=40, file=file)}
    others = set()
    for q in whole:
        parent = full.get(q.detail("id"))
        assert len(q.documents) == 3
        if parent is not None:
            assert [q.documents[i] for i in q.gold] == [parent.documents[i] for i in parent.gold]
            assert [d for d in parent.documents if d in q.documents] == list(q.documents), "the file's order"
        others |= {d for i, d in enumerate(q.documents) if i not in q.gold}
    assert len(others) > 2, "the others are drawn, not always the first"


def test_documents_cut_at_their_ends(hotpot_file: str) -> None:
    questions = documents.load("hotpotqa", n=6, file=hotpot_file)
    tokenizer = train([q.text + q.answer for q in questions], vocab=900)
    for q in questions:
        cut = cut_texts(tokenizer, q.prefix, q.documents, q.suffix, answer=q.answer)
        assert [tokenizer.decode(chunk) for chunk in cut.blocks.chunks] == list(q.documents)
        assert cut.straddling == ()


@pytest.mark.parametrize(
    ("name", "text", "options", "match"),
    [
        ("x.json", None, {}, "there is no file"),
        ("x.json", "[{", {}, "is not json"),
        ("x.jsonl", "[1]\n", {}, "must hold a list of objects"),
        ("x.json", "{}", {}, "must hold a list of objects"),
        ("x.json", '[{"question": "?"}]', {}, 'row 0: no "answer"'),
        ("x.json", json.dumps([hotpot(1) | {"context": 3}]), {}, "row 0: not in the form of hotpotqa"),
        ("x.json", json.dumps([hotpot(1)]), {"documents": 9}, "of 1 usable records in the file, none"),
        ("x.json", json.dumps([hotpot(1)]), {"documents": 1}, "none of split train or test has 1 documents"),
        ("x.json", json.dumps([hotpot(1)]), {"documents": 0}, "documents is 0"),
        ("x.json", json.dumps([hotpot(1)]), {"n": 2}, "1 distinct questions"),
        ("x.json", json.dumps([hotpot(1)]), {"setting": "wiki"}, 'setting is "wiki"'),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, text: str | None, options: dict[str, Any], match: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=match):
        documents.load("hotpotqa", file=str(tmp_path / name), **{"n": 1, **options})


def test_without_a_file_the_hub_is_asked(hotpot_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, ...]] = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options["repo_type"]))
        return hotpot_file

    records.from_hub.cache_clear()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = documents.load("hotpotqa", n=4, setting="fullwiki")
    records.from_hub.cache_clear()
    assert found == documents.load("hotpotqa", n=4, file=hotpot_file)
    assert asked == [("hotpotqa/hotpot_qa", "fullwiki/validation-00000-of-00001.parquet", "dataset")]


def test_without_a_file_or_a_hub_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    import kvnotes_interp.sources as sources

    def nothing(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", nothing)
    monkeypatch.setattr(sources, "hub_reachable", lambda: False)
    with pytest.raises(InputError, match=r'cannot be reached.*file="\.\.\.".*musique_ans_v1\.0_dev\.jsonl'):
        documents.load("musique", n=4, revision="nowhere")


@pytest.mark.hub
@pytest.mark.parametrize("name", documents.names_from_files())
def test_the_hubs_own_files_are_in_this_form(name: str) -> None:
    from kvnotes_interp.sources import hub_reachable

    if not hub_reachable():
        pytest.skip("the Hugging Face hub cannot be reached")
    questions = documents.load(name, n=20, documents=4)
    assert len({q.key for q in questions}) == 20
    assert all(len(q.documents) == 4 and len(q.gold) >= 2 for q in questions)
