"""Files: written whole or not at all, and read with every fault named: the file, the place in it, and what to do.

    about = read_yaml(path, "card", of=dict)       # InputError: card a.yaml, line 7: the key "n" stands twice. ...

Everything that a user or a run wrote is read here. Text is UTF-8; a byte-order mark is accepted. A key that stands
twice is refused, since one of its two values would vanish, and so is half a character (a lone surrogate), which no
tokenizer takes. Nothing here imports torch, numpy or pandas.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvnotes_interp.errors import InputError, KVNotesError

_KINDS: dict[type, str] = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:]', re.DOTALL)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it takes `path`'s name, on failure it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_text(path: Any, what: str = "file") -> str:
    """The text of a UTF-8 file, lines ending in a newline. `path` is a path, or a resource of a package.

    Raises InputError when it cannot be opened, is in another encoding, or holds NUL characters.
    """
    where = f"{what} {path}"
    try:
        data = path.read_bytes() if hasattr(path, "read_bytes") else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror or error}.") from error
    skip = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        text = data[skip:].decode("utf-8")
    except UnicodeDecodeError as error:
        at, guess = skip + error.start, " (it looks like UTF-16)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        line = data.count(b"\n", 0, at) + 1
        raise InputError(
            f"{where} is no UTF-8 text{guess}: byte {at} (0x{data[at]:02x}, line {line}): {error.reason}. "
            "Save it as UTF-8."
        ) from error
    if "\0" in text:
        at = data.index(b"\0")
        raise InputError(f"{where} is not text: byte {at} is NUL (UTF-16, or a binary file). Save it as UTF-8.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Any, what: str = "file", *, of: type | None = None) -> Any:
    """The value of a JSON file, at its top of type `of`. Raises InputError as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, what), f"{what} {path}", of=of)


def read_json_lines(path: Any, what: str = "file", *, of: type | None = None, torn: bool = False) -> list[Any]:
    """The value of every line that is not blank. `torn`: what stands behind the last newline is left out.

    Raises InputError that names the line.
    """
    text = read_text(path, what)
    text = text[: text.rfind("\n") + 1] if torn else text
    # Only a newline ends a line: str.splitlines would cut a text at U+2028, which JSON may hold as it is.
    rows = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [parse_json(line, f"{what} {path}", of=of, line=number) for number, line in rows]


def read_yaml(path: Any, what: str = "file", *, of: type | None = None) -> Any:
    """The value of a YAML file, at its top of type `of`. Raises InputError as `read_text` and `parse_yaml` do."""
    return parse_yaml(read_text(path, what), f"{what} {path}", of=of)


def parse_json(text: str, where: str, *, of: type | None = None, line: int = 1) -> Any:
    """The value of a JSON text whose first line is number `line` of `where`.

    Raises InputError for broken syntax, a key that stands twice, a lone surrogate, and another type than `of`.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            key, place = _first_twice(text)
            raise InputError(_twice(f"{where}, line {line + place}", key))
        return found

    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        place = f"line {line + error.lineno - 1}, column {error.colno}"
        raise InputError(f"{where} is not valid JSON, {place}: {error.msg}. Mend it or write it anew.") from error
    except RecursionError as error:
        raise InputError(f"{where} is not valid JSON: it is nested too deeply.") from error
    except ValueError as error:
        if isinstance(error, KVNotesError):
            raise
        raise InputError(f"{where} is not valid JSON: {error}.") from error
    return _checked(value, where, of)


def parse_yaml(text: str, where: str, *, of: type | None = None) -> Any:
    """The value of a YAML text.

    Raises InputError for broken syntax, a key that stands twice, a lone surrogate, and another type than `of`.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[Hashable] = set()
            for key, _ in node.value if node is not None else ():
                if not isinstance(key, yaml.ScalarNode):
                    continue
                value = key.value if key.tag.endswith((":merge", ":value")) else self.construct_object(key)
                if value in seen:  # as the mapping would have it: yes is true, and 1 is 1.0
                    raise InputError(_twice(f"{where}, line {key.start_mark.line + 1}", key.value))
                seen.add(value)
            return node

    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        said = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise InputError(f"{where} is not valid YAML: {said}") from error
    except RecursionError as error:
        raise InputError(f"{where} is not valid YAML: it is nested too deeply.") from error
    except (ValueError, AttributeError) as error:  # a date that is none
        if isinstance(error, KVNotesError):
            raise
        raise InputError(f"{where} is not valid YAML: {error}. Write texts in quotes.") from error
    return _checked(value, where, of)


def check_text(text: str, where: str) -> str:
    """`text`. Raises InputError when it holds half a character (a lone surrogate) or NUL: no tokenizer reads these."""
    if not isinstance(text, str):
        raise InputError(f"{where}: {text!r} is no text; write it in quotes.")
    if found := _SURROGATE.search(text):
        raise InputError(
            f"{where}: character {found.start()} is half a character, a lone surrogate (\\u{ord(found.group()):04x}). "
            "Write the character itself, in UTF-8."
        )
    if "\0" in text:
        raise InputError(f"{where}: character {text.index(chr(0))} is NUL. Take it out.")
    return text


def entry(data: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str, remedy: str = "") -> Any:
    """`data[name]` of type `kind`. Raises InputError that names the entry of `where`, and says `remedy`."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    words = " or ".join(_KINDS.get(one, one.__name__) for one in kinds)
    if name not in data:
        raise InputError(f'{where} has no entry "{name}", which should be {words}. {remedy}'.rstrip())
    value = data[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise InputError(f'{where}, entry "{name}": found {_short(value)}, which should be {words}. {remedy}'.rstrip())
    return value


@contextmanager
def faults_of(where: str, remedy: str = "") -> Iterator[None]:
    """Turn what the contents of a file can cause inside (a missing name, a wrong type or shape) into an InputError."""
    try:
        yield
    except KVNotesError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise InputError(f"{where} is not in the form that is read here ({said}). {remedy}".rstrip()) from error


def _checked(value: Any, where: str, of: type | None) -> Any:
    """`value`, of type `of` and without lone surrogates in any text or key."""
    if of is not None and not isinstance(value, of):
        raise InputError(f"{where} must hold {_KINDS[of]} at its top; found {_short(value)}.")
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        place, one = stack.pop()
        if isinstance(one, str):
            if _SURROGATE.search(one):
                check_text(one.replace("\0", " "), f"{where}, {place or 'the text'}")
        elif isinstance(one, dict | list) and id(one) not in seen:  # a YAML alias may stand inside itself
            seen.add(id(one))
            named = one.items() if isinstance(one, dict) else enumerate(one)
            for key, inner in named:
                if isinstance(key, str) and _SURROGATE.search(key):
                    check_text(key.replace("\0", " "), f"{where}, a key of {place or 'the top'}")
                stack.append((f"{place}.{key}" if place else str(key), inner))
    return value


def _twice(where: str, key: str) -> str:
    return f'{where}: the key "{key}" stands twice. Keep one: the other would be left out without a word.'


def _first_twice(text: str) -> tuple[str, int]:
    """The first key of a valid JSON text that stands twice in its object, and the number of lines before it."""
    stack: list[set[str]] = []
    string = ("", 0)
    for found in _TOKEN.finditer(text):
        sign = found.group()
        if sign in "{[":
            stack.append(set())
        elif sign in "}]":
            stack.pop()
        elif sign != ":":
            string = (sign, found.start())
        else:
            key = json.loads(string[0])
            if key in stack[-1]:
                return key, text.count("\n", 0, string[1])
            stack[-1].add(key)
    raise AssertionError("called for a text in which no key stands twice")


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{_KINDS.get(type(value), type(value).__name__)}: {text if len(text) <= 60 else text[:57] + '...'}"
