"""A user's own family file: YAML, JSON, and faults named by file, field and cure."""

from __future__ import annotations

import pytest

from kvnotes_interp import tasks
from kvnotes_interp.errors import InputError


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml", "mine.json"])
def test_a_file_is_a_family(family_file, name: str) -> None:
    path = family_file(name)
    pairs = tasks.load(path, n=6)
    assert {pair.family for pair in pairs} == {"mine"}
    assert tasks.load(str(path), n=6) == pairs
    assert {pair.text_old.split(". ", 1)[1] for pair in pairs} == {"Red means stop, green means go. So we"}
    info = tasks.info(path)
    assert (info.instances, info.contents, info.kind) == (6, 2, "derived")


def test_entries_may_be_mappings_and_use_slots(family_file) -> None:
    path = family_file(
        prompt=[{"context": "{who} sees {field}. "}, {"rule": "{case.text} "}, {"decision": "So {who} will"}],
        values={" {case.x}": ["{case.a}"], " {case.y}": ["{case.b}"]},
        slots={
            "who": ["Ann", "Bob"],
            "case": [
                {"id": "light", "a": "red", "b": "green", "x": "stop", "y": "go", "text": "Red stops {who}."},
                {"id": "bell", "a": "one", "b": "two", "x": "sit", "y": "rise", "text": "One seats {who}."},
            ],
        },
        content="case",
    )
    pairs = tasks.load(path, n=4)
    assert {pair.content for pair in pairs} == {"mine:light", "mine:bell"}
    bell = next(pair for pair in pairs if pair.content == "mine:bell")
    assert {bell.field_old, bell.field_new} == {"one", "two"}
    assert {bell.answer_old, bell.answer_new} == {" sit", " rise"}
    assert "One seats" in bell.text_old
    assert "{" not in bell.text_old


def test_filler_lines_from_a_file_beside_it(family_file) -> None:
    changes = {
        "prompt": [
            {"context": "The {thing} is {field}.\n"},
            {"filler": "- {filler}\n"},
            {"decision": "So we"},
        ],
        "fillers": {"count": 2, "lines": "lines.txt"},
    }
    path = family_file(**changes)
    (path.parent / "lines.txt").write_text("# a comment\nOne.\nTwo.\nThree.\n")
    assert tasks.load(path, n=2)[0].text_old.count("- ") == 2
    (path.parent / "lines.txt").unlink()
    with pytest.raises(InputError, match=r'mine.yaml", fillers.lines: there is no file "lines.txt"'):
        tasks.load(path, n=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "deduced"}, "kind: .*'derived'"),
        ({"about": None}, "about: is missing"),
        ({"vaules": {}}, 'vaules: is not a known field. Did you mean "values"'),
        ({"values": {" stop": ["red", True], " go": ["green"]}}, "write it in quotes"),
        ({"values": {" stop": ["red", "green"]}}, "at least two answers"),
        ({"values": {" stop": ["red"], " go": ["red"]}}, '"red" stands twice'),
        ({"values": ["red", "green"]}, "needs `answer"),
        ({"slots": {"thing": []}}, "slots.thing: is empty"),
        ({"slots": {"thnig": ["a"]}}, 'uses "{thing}", but slots has no such name. Did you mean "thnig"'),
        ({"slots": {"thing": ["a"], "spare": ["b"]}}, "slots.spare is used in no text"),
        ({"content": "thin"}, 'content is "thin".* Did you mean "thing"'),
        ({"prompt": [{"contxt": "{field} {thing} x"}]}, '"contxt" is not a region.* Did you mean "context"'),
        ({"prompt": [{"context": "The {thing} is"}]}, '"{field}" must stand exactly once'),
        ({"prompt": [{"context": "The {thing} is {field}"}]}, "nothing follows {field}"),
        ({"prompt": [{"context": "The {thing} { is {field} x"}]}, "loose brace"),
        ({"prompt": [{"context": "The {thing} is {field} x", "rule": "y"}]}, "every item is one"),
        ({"chat": True}, "in chat form"),
        ({"fillers": {"count": 1, "lines": ["a"]}}, "go together"),
        ({"kind": "control"}, "kind control needs"),
        ({"values": {" stop": ["red"], " go": ["green"]}}, "too few values to split"),
    ],
)
def test_faults_name_the_file_the_field_and_the_cure(family_file, changes: dict, words: str) -> None:
    path = family_file(**changes)
    with pytest.raises(InputError, match=words) as caught:
        tasks.load(path, n=1)
    assert "mine" in str(caught.value)


def test_a_file_that_is_not_yaml_or_json(tmp_path) -> None:
    for name, text in (("a.yaml", "kind: [derived"), ("a.json", "{kind"), ("b.yaml", "- 1\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=name):
            tasks.load(tmp_path / name, n=1)


def test_slots_in_a_circle(family_file) -> None:
    with pytest.raises(InputError, match="circle"):
        tasks.load(family_file(slots={"thing": ["a {thing}"]}), n=1)
