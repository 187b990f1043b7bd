"""Assertions of this suite that could not fail, whatever the package does. Found in the text of the tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LOOSE = 1.0  # a tolerance from here on says nothing
ANYTHING = ("Exception", "BaseException")


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is wrong with it)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield from ((node.lineno, why) for why in _always(node.test))
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, why) for why in _loose(node))
        elif isinstance(node, ast.Try):
            swallows = any(isinstance(s, ast.Pass) for handler in node.handlers for s in handler.body)
            if swallows and any(isinstance(inner, ast.Assert) for s in node.body for inner in ast.walk(s)):
                kinds = {ast.unparse(handler.type) if handler.type else "" for handler in node.handlers}
                if kinds & {"", "AssertionError", *ANYTHING}:
                    yield node.lineno, "swallows its own assertion"
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not _checks(node):
            yield node.lineno, f"{node.name} asserts nothing"


def _always(test: ast.expr) -> Iterator[str]:
    """Reasons for which this expression is true whatever happens."""
    if isinstance(test, ast.Constant) and test.value:
        yield "a constant"
    if isinstance(test, (ast.Tuple, ast.List, ast.Set, ast.Dict)) and ast.unparse(test) not in ("()", "[]", "{}"):
        yield "a collection with something in it"
    if isinstance(test, ast.Lambda | ast.GeneratorExp):
        yield "an object that is never false"
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        for side in test.values:
            yield from (f"one side of the or: {why}" for why in _always(side))
            if _of_a_name(side, test.values):
                yield "the or holds whether the name is there or not: what is lazy is made by looking"
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for side in test.values:
            yield from (f"one side of the and: {why}" for why in _always(side))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, operator, right = test.left, test.ops[0], test.comparators[0]
        zero = isinstance(right, ast.Constant) and right.value == 0
        if ast.dump(left) == ast.dump(right) and not _calls(left):
            yield "a thing compared with itself"  # NaN apart, which `isnan` asks for in words
        size = isinstance(left, ast.Call) and ast.unparse(left.func).rpartition(".")[2] in ("len", "abs")
        if isinstance(operator, ast.GtE) and zero and size:
            yield "a size is never below 0"
        made = isinstance(left, (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp))
        if isinstance(operator, ast.IsNot) and made:
            yield "what was just built is not None"


def _of_a_name(side: ast.expr, sides: list[ast.expr]) -> bool:
    """`"x" not in vars(m) or m.x is not None`: looking at a lazy `m.x` makes it, or raises."""
    if not (isinstance(side, ast.Compare) and isinstance(side.ops[0], ast.NotIn)):
        return False
    inside = side.comparators[0]
    if not (
        isinstance(side.left, ast.Constant) and isinstance(inside, ast.Call) and ast.unparse(inside.func) == "vars"
    ):
        return False
    looked = f"{ast.unparse(inside.args[0])}.{side.left.value} is not None"
    return any(ast.unparse(other) == looked for other in sides)


def _calls(node: ast.AST) -> bool:
    """Two calls may give two things: that they do not is what such a test asks."""
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _loose(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "raises" and call.args:
        kinds = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else [call.args[0]]
        if any(ast.unparse(kind) in ANYTHING for kind in kinds) and not any(k.arg == "match" for k in call.keywords):
            yield "raises anything at all"
    if name in ("approx", "allclose", "assert_close", "assert_allclose", "isclose"):
        for keyword in call.keywords:
            value = keyword.value
            if keyword.arg in ("rel", "rtol") and isinstance(value, ast.Constant) and float(value.value or 0) >= LOOSE:
                yield f"{keyword.arg}={value.value} lets everything pass"


def _checks(function: ast.FunctionDef) -> bool:
    """An assert, or a call of something that is named as one: `raises`, `assert_close`, `same`, `refused` ..."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in CHECKING or name.startswith("assert_"):
                return True
    return False


def _helpers() -> set[str]:
    """Names of functions here that assert in their own body: a test that calls one of them checks something."""
    names = {"raises", "warns", "fail"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
                text = ast.unparse(node)
                if "assert" in text or "pytest.raises" in text:
                    names.add(node.name)
    return names


FILES = sorted(TESTS.rglob("*.py"))
CHECKING = _helpers()


def test_there_are_tests_to_look_at() -> None:
    assert len(FILES) > 80


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(TESTS)) for path in FILES])
def test_no_assertion_is_always_true(path: Path) -> None:
    found = list(faults(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, "\n".join(f"{path.name}:{line}: {why}" for line, why in sorted(found))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("assert True", "constant"),
        ("assert 1", "constant"),
        ('assert (x, "message")', "collection"),
        ("assert [x]", "collection"),
        ("assert (y for y in x)", "never false"),
        ("assert x or True", "one side of the or: a constant"),
        ("assert x and 1", "one side of the and: a constant"),
        ('assert "x" not in vars(m) or m.x is not None', "whether the name is there or not"),
        ("assert x.y == x.y", "with itself"),
        ("assert len(x) >= 0", "below 0"),
        ("assert abs(x) >= 0", "below 0"),
        ("assert (a - b).abs() >= 0", "below 0"),
        ("assert [] is not None", "just built"),
        ('assert f"{x}" is not None', "just built"),
        ("pytest.raises(Exception)", "anything at all"),
        ("pytest.raises((ValueError, Exception))", "anything at all"),
        ("assert x == pytest.approx(y, rel=1.5)", "lets everything pass"),
        ("torch.testing.assert_close(a, b, rtol=2, atol=0)", "lets everything pass"),
        ("try:\n    assert x\nexcept AssertionError:\n    pass", "swallows"),
        ("try:\n    assert x\nexcept:\n    pass", "swallows"),
        ("def test_x():\n    y = 1", "asserts nothing"),
    ],
)
def test_each_fault_is_found(line: str, why: str) -> None:
    found = list(faults(ast.parse(line)))
    assert len(found) == 1, found
    assert why in found[0][1]


@pytest.mark.parametrize(
    "line",
    [
        "assert x",
        "assert f(x) == f(x)",
        "assert x is not None",
        "assert len(x) >= 1",
        "assert not x or y",
        'pytest.raises(Exception, match="words")',
        "assert x == pytest.approx(y, rel=1e-3)",
        "try:\n    assert x\nexcept OSError:\n    pass",
        "def test_x():\n    assert y",
        "def test_x():\n    with pytest.raises(ValueError):\n        y()",
    ],
)
def test_what_can_fail_is_left_alone(line: str) -> None:
    assert not list(faults(ast.parse(line)))
