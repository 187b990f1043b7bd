"""Family files: one small YAML or JSON file declares a family of counterfactual pairs.

    kind: derived            # derived (a conclusion), verbatim (a lookup) or control (the answer must not change)
    about: What the family asks, in one sentence.
    source: Where the idea comes from.
    label: "{place}'s visitor"  # the field in words, for texts that speak of it; "the value" by default
    content: field           # what makes two instances dependent: "field" (its two values) or the name of a slot
    prompt:                  # pieces in order, each `region: text`
      - context: "{field} went to the {place}. "
      - decision: "On the way home,"
    values:                  # answer: values of the field that lead to it
      " he": [John, Peter]
      " she": [Mary, Susan]
    slots:                   # every {name} in a text is filled from here
      place: [market, station]

Regions are preamble, context, rule, filler, decision. `{field}` stands exactly once. Braces are only for slots.

- A slot's entry may be a mapping: `rule: [{id: lights, on: red, off: green}]` gives `{rule.on}` and `{rule.off}`.
  Entries may use other slots, and so may the values and answers: `values: {" {rule.x}": ["{rule.on}"]}`.
- `values: [a, b, ...]` with `answer: " {field}"` is a copy task: each value is its own answer.
- kind control: `values: [a, b, ...]` with `answers: [" right", " wrong"]`; any two values are paired.
- `chat: true`: the prompt is a list of turns, `- user: [pieces]`. A last turn `- assistant: [pieces]` is the
  forced beginning of the answer, e.g. "Decision:".
- Neutral filler: a piece `filler: "- {filler}\\n"` is repeated `fillers.count` times, each time with another of
  `fillers.lines` (a list, or the name of a text file beside this file with one line each).

`content: field` splits the values themselves into train and test, so no value is in both; a slot splits its entries.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError, model_validator

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.files import read_json, read_text, read_yaml
from kvnotes_interp.tasks.pair import WRITABLE_REGIONS

SLOT = re.compile(r"\{([A-Za-z_][\w.]*)\}")
FILE_TYPES = (".yaml", ".yml", ".json")
CHAT_ROLES = ("system", "user", "assistant")

PieceSpec = dict[StrictStr, StrictStr]
Entry = StrictStr | dict[StrictStr, StrictStr]


class Fillers(BaseModel):
    """Neutral lines: `count` of them are drawn from `lines`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(default=30, ge=0)
    lines: StrictStr | list[StrictStr]


class Family(BaseModel):
    """A family file, checked. The format is described at the top of this module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["derived", "verbatim", "control"]
    about: StrictStr
    source: StrictStr
    content: StrictStr
    chat: bool = False
    prompt: list[dict[StrictStr, Any]] = Field(min_length=1)
    values: dict[StrictStr, list[StrictStr]] | list[StrictStr]
    label: StrictStr = "the value"
    answer: StrictStr | None = None
    answers: list[StrictStr] | None = None
    slots: dict[StrictStr, list[Entry]] = Field(default_factory=dict)
    fillers: Fillers | None = None

    @model_validator(mode="after")
    def _check(self) -> Family:
        pieces = [piece for _, group in self.turns() for piece in group]
        _check_pieces(pieces)
        self._check_answers()
        for name, entries in self.slots.items():
            _check_entries(name, entries)
        if "{field}" in self.label or "{filler}" in self.label:
            raise ValueError("label: {field} and {filler} may stand only in the prompt")
        used = {slot for text in self._texts(pieces) for slot in SLOT.findall(text)} - {"field", "filler"}
        known = self.slot_names()
        for slot in sorted(used - known):
            raise ValueError(f'the text uses "{{{slot}}}", but slots has no such name.{nearest(slot, known)}')
        unused = sorted(name for name in self.slots if not any(u.split(".")[0] == name for u in used))
        if unused:
            raise ValueError(f'slots.{unused[0]} is used in no text; write "{{{unused[0]}}}" or remove it')
        if self.content != "field" and self.content not in self.slots:
            choices = ["field", *self.slots]
            raise ValueError(
                f'content is "{self.content}"; it must be "field" or a slot ({", ".join(choices)}).'
                f"{nearest(self.content, choices)}"
            )
        with_filler = any("{filler}" in text for _, text in pieces)
        if with_filler != (self.fillers is not None):
            raise ValueError('"fillers" and a piece `filler: "... {filler} ..."` go together; one is missing')
        return self

    def turns(self) -> list[tuple[str, list[tuple[Any, str]]]]:
        """The prompt as (role, [(region, text)]); plain prompts are one turn with role ""."""
        if not self.chat:
            return [("", [_one_item(piece, "prompt") for piece in self.prompt])]
        turns = []
        for turn in self.prompt:
            role, pieces = _one_item(turn, "prompt")
            if role not in CHAT_ROLES or not isinstance(pieces, list) or not pieces:
                raise ValueError(
                    f"prompt: in chat form every item is `role: [pieces]` with a role of {', '.join(CHAT_ROLES)}; "
                    f'found "{role}".{nearest(role, CHAT_ROLES)}'
                )
            turns.append((role, [_one_item(piece, f"prompt.{role}") for piece in pieces]))
        if turns[0][0] == "assistant":
            raise ValueError('prompt: the first turn is "assistant"; put a "user" turn before it')
        return turns

    def entries(self) -> list[tuple[str, str]]:
        """All (value, answer template) of the field, in file order."""
        if isinstance(self.values, dict):
            return [(value, answer) for answer, values in self.values.items() for value in values]
        return [(value, self.answer or "") for value in self.values]

    def slot_names(self) -> set[str]:
        """Names that a text may use, without "field" and "filler"."""
        names = set()
        for name, entries in self.slots.items():
            first = entries[0]
            names |= {f"{name}.{key}" for key in first} if isinstance(first, dict) else {name}
        return names

    def _check_answers(self) -> None:
        if self.kind == "control":
            if isinstance(self.values, dict) or self.answer or not self.answers or len(self.answers) != 2:
                raise ValueError('kind control needs `values` as a list and `answers: [" right", " wrong"]`')
        elif self.answers:
            raise ValueError("`answers` is for kind control; write `values` as a mapping answer: [values]")
        elif isinstance(self.values, list):
            if not self.answer or "{field}" not in self.answer:
                raise ValueError('`values` as a list needs `answer: " {field}"`; else map answers to values')
        elif self.answer:
            raise ValueError("`answer` goes with `values` as a list; remove it or list the values")
        elif len(self.values) < 2:
            raise ValueError("`values` needs at least two answers: the flip must change the decision")
        given = self.answers or [answer for _, answer in self.entries()]
        if not all(given):
            raise ValueError('an answer is empty; write the text that follows the prompt, such as " yes"')
        if self.answers and self.answers[0] == self.answers[1]:
            raise ValueError(f"answers: both are {self.answers[0]!r}; the right and the wrong one must differ")
        values = [value for value, _ in self.entries()]
        repeated = sorted({value for value in values if values.count(value) > 1})
        if repeated:
            raise ValueError(f'values: "{repeated[0]}" stands twice')
        if len(values) < 2:
            raise ValueError("`values` needs at least two values")

    def _texts(self, pieces: list[tuple[str, str]]) -> list[str]:
        texts = [text for _, text in pieces]
        for value, answer in self.entries():
            texts += [value, answer]
        texts += [*(self.answers or []), self.label]
        for entries in self.slots.values():
            for entry in entries:
                texts += entry.values() if isinstance(entry, dict) else [entry]
        return texts


@dataclass(frozen=True)
class FamilyFile:
    """A checked family with its name (the file's stem) and its filler lines read."""

    name: str
    spec: Family
    filler_lines: tuple[str, ...]


def packaged() -> tuple[str, ...]:
    """Names of the families that come with the package."""
    return tuple(sorted(p.name[:-5] for p in _folder().iterdir() if p.name.endswith(".yaml")))


def find(name_or_path: str | Path) -> FamilyFile:
    """Read a packaged family by name, or a user's file by path (anything with a separator or a file suffix).

    Raises:
        InputError: no such family or file, or the file does not follow the format.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(FILE_TYPES) or "/" in text:
        path = Path(text).expanduser()
        if path.suffix not in FILE_TYPES:
            raise InputError(f'Family file "{path}" must end in {", ".join(FILE_TYPES)}.')
        if not path.is_file():
            raise InputError(f'There is no family file "{path}". Packaged families: {", ".join(packaged())}.')
        return _parse(path, path.parent)
    if text not in packaged():
        raise InputError(
            f'There is no task family "{text}".{nearest(text, packaged())} Families: {", ".join(packaged())}; '
            "or give the path of a YAML or JSON family file."
        )
    return _packaged_file(text)


@lru_cache(maxsize=64)
def _packaged_file(name: str) -> FamilyFile:
    file = _folder() / f"{name}.yaml"
    return _parse(file, _folder())


def _folder() -> Any:
    return resources.files("kvnotes_interp.tasks") / "families"


def _parse(file: Any, folder: Any) -> FamilyFile:
    shown, name = str(file), file.name.rpartition(".")[0]
    data = (read_json if shown.endswith(".json") else read_yaml)(file, "Family file", of=dict)
    try:
        spec = Family.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(shown, error)) from error
    return FamilyFile(name, spec, _filler_lines(spec, shown, folder))


def _filler_lines(spec: Family, shown: str, folder: Any) -> tuple[str, ...]:
    if spec.fillers is None:
        return ()
    lines = spec.fillers.lines
    if isinstance(lines, str):
        if "/" in lines or "\\" in lines or not (folder / lines).is_file():
            raise InputError(
                f'Family file "{shown}", fillers.lines: there is no file "{lines}" beside it. Give the name of a text '
                "file in the same folder, one line each, or write the lines as a list."
            )
        lines = neutral_lines(folder / lines)
    if len(set(lines)) < max(len(lines), spec.fillers.count):
        raise InputError(
            f'Family file "{shown}", fillers: count is {spec.fillers.count}, but there are {len(set(lines))} distinct '
            f"lines of {len(lines)}. Add or replace lines, or lower the count."
        )
    return tuple(lines)


def neutral_lines(file: Any) -> list[str]:
    """The lines of a text file, without blank ones and those that begin with #. Raises InputError as `read_text`."""
    lines = read_text(file, "filler file").split("\n")
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _explain(shown: str, error: ValidationError) -> str:
    """Pydantic's findings as one line per field, with what to do."""
    lines = []
    for item in error.errors():
        inner = ("str", "constrained-str", "list[constrained-str]", "list[nullable]")
        place = ".".join(str(part) for part in item["loc"] if not str(part).startswith((*inner, "dict[", "list[")))
        advice = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            advice = f"is not a known field.{nearest(str(item['loc'][-1]), Family.model_fields)}"
        elif item["type"] == "missing":
            advice = "is missing; add it"
        elif item["type"] == "string_type":
            advice = f"must be text, found {item['input']!r}; write it in quotes"
        line = f"  {place}: {advice}" if place else f"  {advice}"
        if line not in lines:
            lines.append(line)
    return f'Family file "{shown}" is not valid:\n' + "\n".join(lines)


def entry_label(entry: str | dict[str, str]) -> str:
    """Name of a slot's entry: its text, its `id`, or all its texts."""
    if isinstance(entry, str):
        return entry
    return entry.get("id") or "|".join(entry.values())


def _one_item(item: dict[str, Any], where: str) -> tuple[Any, Any]:
    if not isinstance(item, dict) or len(item) != 1:
        raise ValueError(f"{where}: every item is one `name: text`, found {item!r}")
    return next(iter(item.items()))


def _check_pieces(pieces: list[tuple[str, Any]]) -> None:
    for region, text in pieces:
        if region not in WRITABLE_REGIONS:
            raise ValueError(
                f'prompt: "{region}" is not a region ({", ".join(WRITABLE_REGIONS)}).'
                f"{nearest(region, WRITABLE_REGIONS)}"
            )
        if not isinstance(text, str) or not text:
            raise ValueError(f"prompt.{region}: must be text, found {text!r}; write it in quotes")
        loose = SLOT.sub("", text)
        if "{" in loose or "}" in loose:
            raise ValueError(f"prompt.{region}: loose brace in {text!r}; braces are only for slots")
    if sum(text.count("{field}") for _, text in pieces) != 1:
        raise ValueError('prompt: "{field}" must stand exactly once')
    if pieces[-1][1].endswith("{field}"):
        raise ValueError("prompt: nothing follows {field}; add text after it, where the decision is read")


def _check_entries(name: str, entries: list[Any]) -> None:
    if name in ("field", "filler") or not name.isidentifier():
        raise ValueError(f'slots: "{name}" cannot be a slot name; use letters, digits and "_"')
    if not entries:
        raise ValueError(f"slots.{name}: is empty; add entries")
    shapes = {tuple(sorted(entry)) if isinstance(entry, dict) else () for entry in entries}
    if len(shapes) > 1:
        raise ValueError(f"slots.{name}: all entries must be texts, or mappings with the same keys")
    if len({json.dumps(entry, sort_keys=True) for entry in entries}) < len(entries):
        raise ValueError(f"slots.{name}: an entry stands twice")
    labels = [entry_label(entry) for entry in entries]
    if len(set(labels)) < len(labels):
        raise ValueError(f"slots.{name}: two entries have the same id")
    for entry in entries:
        for text in entry.values() if isinstance(entry, dict) else [entry]:
            if "{field}" in text or "{filler}" in text:
                raise ValueError(f"slots.{name}: {{field}} and {{filler}} may stand only in the prompt")
