"""The options of `kvprobe`: names as in Python, one line of help each, grouped into panels."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.files import check_text, parse_json

# As in sites.py and probes/patching.py, which cannot be asked without importing torch; a test holds them together.
PARTS = ("kv", "k", "v")
VIEWS = ("position", "layer", "layer_position", "region", "random")
PATHS = ("auto", "shared", "plain")
FEATURES = ("residual", "keys", "values")
CLASSIFIERS = ("logistic", "mean_difference")
ANALYSES = ("knockout", "read_heads", "write_heads", "mlp_share", "scrub", "dose")
ABLATIONS = ("resample", "mean", "zero")
ROWS = ("terminal", "suffix", "answer")
BLOCKS = ("sentences", "documents")
TAILS = ("last", "suffix")
SLIDING = ("keep", "compact")
COMPACTORS = "random@4,streaming,key_norm,h2o,snapkv,attention_matching"
RANKINGS = (
    "causal",
    "kv_change",
    "hidden_change",
    "attention",
    "punctuation",
    "last",
    "random",
    "profiled",
)
WORDINGS = ("bare", "tagged", "override", "aggressive", "restate")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")

_WHOLE, _DECIMAL = re.compile(r"[+-]?[0-9]+"), re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

_MODEL, _PAIRS, _SITES, _EDITS, _RUN = "Model", "Pairs", "Sites", "Edits", "Run"  # panels of --help


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_NAME = {"metavar": "NAME"}
ModelName = Annotated[str, _option(_MODEL, "Alias, hub id, folder or .gguf: kvprobe models.", "--model", **_NAME)]
Device = Annotated[str | None, _option(_MODEL, "cpu, cuda, cuda:1, mps; CUDA when there is one.", **_NAME)]
Dtype = Annotated[
    str | None, _option(_MODEL, "float32 (default on a CPU), bfloat16 (on CUDA), float16, float64.", **_NAME)
]
Revision = Annotated[str | None, _option(_MODEL, "Hub commit or branch, in place of the pinned one.", metavar="REV")]
TaskName = Annotated[str, _option(_PAIRS, "Family, or a YAML/JSON file: kvprobe tasks.", "--task", **_NAME)]
Count = Annotated[int, _option(_PAIRS, "Pairs to try.", "--n", metavar="N", min=1)]
CardCount = Annotated[int | None, _option(_PAIRS, "Pairs to try, in place of the card's.", "--n", metavar="N", min=1)]
Seed = Annotated[int, _option(_PAIRS, "Seed of pairs, random sites and bootstrap.", metavar="N")]
Split = Annotated[str | None, _option(_PAIRS, "train or test: only contents of that split.", metavar="SPLIT")]
TaskOption = Annotated[
    list[str] | None,
    _option(_PAIRS, "Option of the family, such as fillers=10. Repeatable.", "--task-option", metavar="NAME=VALUE"),
]
MinGap = Annotated[float, _option(_PAIRS, "A pair counts if its logit difference changes by this much.", metavar="X")]
MinGapNoise = Annotated[float, _option(_PAIRS, "The same in noise floors; the larger one holds.", metavar="X")]
Parts = Annotated[str, _option(_SITES, "Keys and values together and apart.", metavar="LIST")]
Views = Annotated[
    str,
    _option(
        _SITES,
        "Beside the four cache states: all, none, or some of position, layer, layer_position, region, random.",
        metavar="LIST",
    ),
]
Draws = Annotated[
    int, _option(_SITES, "Random sites per pair (patch), random sets per k (suffix).", metavar="N", min=1)
]
MapPairs = Annotated[
    int, _option(_SITES, "Pairs, from the first, that get the layer x position map.", metavar="N", min=0)
]
Features = Annotated[str, _option(_SITES, "Read from: residual, keys, values.", metavar="LIST")]
Classifiers = Annotated[str, _option(_SITES, "logistic, mean_difference.", metavar="LIST")]
Layers = Annotated[str, _option(_SITES, "all, or some numbers; up to 16 evenly spread by default.", metavar="LIST")]
Folds = Annotated[int, _option(_SITES, "Parts of the contents; each is held out once.", metavar="N", min=2)]
LinearDraws = Annotated[int, _option(_SITES, "Shuffles of the labels, random directions.", "--draws", min=1)]
DirectionPairs = Annotated[int, _option(_SITES, "Pairs that get directions added and removed.", metavar="N", min=0)]
Analyses = Annotated[str, _option(_SITES, f"all, or some of {', '.join(ANALYSES)}.", metavar="LIST")]
HeadKs = Annotated[str, _option(_SITES, "Numbers of heads in the cumulative curves.", "--ks", metavar="LIST")]
Notes = Annotated[int, _option(_SITES, "Positions that make the note.", metavar="N", min=1)]
CircuitDraws = Annotated[int, _option(_SITES, "Random sets per size.", "--draws", metavar="N", min=1)]
Ablations = Annotated[str, _option(_SITES, "Of read heads: resample, mean, zero.", metavar="LIST")]
GridPairs = Annotated[int, _option(_SITES, "Pairs, from the first, that get every head patched.", metavar="N", min=0)]
Operator = Annotated[
    str | None,
    _option(
        _EDITS, "Make both caches by this operator, NAME or NAME@VALUE, and not in one prefill.", "--operator", **_NAME
    ),
]
Blocks = Annotated[str, _option(_EDITS, "Where it cuts: sentences, documents.", metavar="NAME")]
Tail = Annotated[str, _option(_EDITS, "Run on top: last token, or the whole suffix.", metavar="NAME")]
Operators = Annotated[str, _option(_EDITS, "Ways to compose the cache: no_recompute, sempic@DIR.", metavar="LIST")]
Rows = Annotated[str, _option(_SITES, "Queries: terminal (last token), suffix, answer.", metavar="NAME")]
Bins = Annotated[int, _option(_SITES, "Stretches of relative position.", metavar="N", min=2)]
SpliceOperators = Annotated[
    str, _option(_EDITS, "Besides full recompute and the joins; packet@DIR.", "--operators", metavar="LIST")
]
Documents = Annotated[str, _option(_PAIRS, "Numbers of documents.", metavar="LIST")]
SpliceShares = Annotated[str, _option(_EDITS, "Of the tokens recomputed.", "--shares", metavar="LIST")]
SeamRepair = Annotated[str, _option(_EDITS, "First tokens of each chunk recomputed.", metavar="LIST")]
OneSeam = Annotated[str, _option(_EDITS, "First tokens of the spliced skill recomputed; all: every one.", metavar="N")]
KeystoneKs = Annotated[str, _option(_EDITS, "Positions behind the field that are patched with it.", metavar="LIST")]
Ks = Annotated[str, _option(_EDITS, "Positions recomputed besides the field, for each ranking.", metavar="LIST")]
Rankings = Annotated[
    str,
    _option(_EDITS, f"Which positions come first: all, or some of {', '.join(RANKINGS)}.", metavar="LIST"),
]
Wordings = Annotated[
    str,
    _option(
        _EDITS, "Of the erratum, the default one first: override, bare, tagged, aggressive, restate.", metavar="LIST"
    ),
]
Shares = Annotated[str, _option(_EDITS, "Of the prompt, for CacheBlend.", metavar="LIST")]
ThoughtTokens = Annotated[
    int, _option(_EDITS, "Also decide after a chain of thought of up to so many tokens.", metavar="N", min=0)
]
Temperature = Annotated[float, _option(_EDITS, "Of the chain of thought; 0 is greedy.", metavar="X", min=0.0)]
Turns = Annotated[int, _option(_EDITS, "Also toggle the field so many times, by errata alone.", metavar="N", min=0)]
Compactors = Annotated[
    str,
    _option(
        _EDITS, "Ways to compact: snapkv, NAME@VALUE, still@DIR, scorer@DIR; random slots in any case.", metavar="LIST"
    ),
]
Ratios = Annotated[str, _option(_EDITS, "Slots before over slots after.", metavar="LIST")]
Passes = Annotated[str, _option(_EDITS, "Parts that a context is read and compacted in.", metavar="LIST")]
Iterative = Annotated[
    bool, _option(_EDITS, "In place of ratios and passes: parts of --chunk tokens, to --budget slots.", "--iterative")
]
Chunk = Annotated[
    int | None, _option(_EDITS, "Tokens read between two compactions (--iterative): 512.", metavar="N", min=1)
]
Slots = Annotated[
    int | None, _option(_EDITS, "Slots kept per KV head (--iterative): 64.", "--budget", metavar="N", min=1)
]
Sliding = Annotated[str, _option(_EDITS, "Layers of a short window: keep (whole), compact.", metavar="NAME")]
QueryAware = Annotated[bool, _option(_EDITS, "Show compactors that observe the question.", "--query-aware")]
Wording = Annotated[str, _option(_EDITS, "Of the erratum.", metavar="NAME")]
MaxNewTokens = Annotated[int, _option(_RUN, "Greedy tokens per answer.", metavar="N", min=1)]
Timing = Annotated[int, _option(_RUN, "Rounds of timing; 0 for none.", metavar="N", min=0)]
Out = Annotated[Path | None, _option(_RUN, "Run folder: table, manifest, figures.", metavar="DIR")]
Resume = Annotated[bool, _option(_RUN, "Go on with a killed run in --out.", "--resume")]
AsJson = Annotated[bool, _option(_RUN, "The summary as JSON, and nothing else, on standard output.", "--json")]
DryRun = Annotated[bool, _option(_RUN, "Print cells, bytes and estimated time; run nothing.", "--dry-run")]
Budget = Annotated[
    float | None,
    _option(_RUN, "For rows in flight; by default a quarter of what is free.", "--memory-budget", metavar="GIB"),
]
SweepPath = Annotated[
    str, _option(_RUN, "auto, shared (one base for all rows), plain (a copy per row).", "--path", metavar="PATH")
]
Quiet = Annotated[bool, _option(_RUN, "No progress bar.", "--quiet")]


def task_options(given: list[str] | None) -> dict[str, Any]:
    """`name=value` pairs as keyword arguments of the family; values are JSON where they can be.

    Raises InputError for an item without a name or a value, a name that is given twice, and text no tokenizer reads.
    """
    out: dict[str, Any] = {}
    for item in given or ():
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name:
            raise InputError(f"--task-option {item!r}: write name=value, for instance fillers=10.")
        if name in out:
            raise InputError(f"--task-option {item!r}: {name} is given twice. Keep one.")
        try:
            json.loads(value)
        except ValueError:
            out[name] = check_text(value, f"--task-option {name}")
        else:
            out[name] = parse_json(value, f"--task-option {name}")
    return out


def read_list(
    option: str, text: str, read: Callable[[str], Any], *, such_as: str, empty: bool = False, again: bool = False
) -> tuple[Any, ...]:
    """Every item of a comma-separated list, `read` without the blanks around it: the one reader of all such options.

    Args:
        read: an item's text to its value. Raises ValueError with what is wrong; an InputError goes through as it is.
        such_as: a right value, for messages. empty: whether no item is one, too.
        again: whether an item may stand twice.

    Raises InputError that names the option, the value and what to write: for no item, an empty one, a repeated one,
    and what `read` refuses.
    """
    words = [word.strip() for word in check_text(text, option).split(",")]
    if words == [""]:
        if empty:
            return ()
        raise InputError(f"{option} {text!r} is empty: write at least one, such as {such_as}.")
    found: list[Any] = []
    for place, word in enumerate(words, 1):
        if not word:
            raise InputError(f"{option} {text!r}: item {place} is empty; write one comma between two, as in {such_as}.")
        try:
            value = read(word)
        except InputError as error:
            raise error if option in str(error) else InputError(f"{option} {text!r}: {error}") from error
        except ValueError as error:
            like = f"write numbers with commas between them, such as {such_as}"
            raise InputError(f"{option} {text!r}: {like}; {word!r} {error}.") from error
        if value in found and not again:
            raise InputError(f"{option} {text!r}: {word!r} stands twice. Keep one.")
        found.append(value)
    return tuple(found)


def words(option: str, text: str, choices: tuple[str, ...], *, none: bool = True) -> tuple[str, ...]:
    """The words of a list, every one a choice; `all`, and `none` where that is allowed, stand for what they say."""
    if text.strip() == "all":
        return choices
    if none and text.strip() == "none":
        return ()
    return read_list(option, text, lambda word: choice(option, word, choices), such_as=f"all, or {choices[0]}")


def numbers(
    option: str,
    text: str,
    kind: type[int] | type[float],
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    such_as: str = "1,2,4",
    **more: bool,
) -> tuple[Any, ...]:
    """The numbers of a list, each at least `least`, or above `above`, and at most `most`; `more` as in `read_list`."""
    return read_list(
        option, text, lambda word: number(word, kind, least=least, above=above, most=most), such_as=such_as, **more
    )


def number(
    word: str,
    kind: type[int] | type[float],
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
) -> Any:
    """The number that `word` writes. Raises ValueError that says what it is not."""
    if not (_WHOLE if kind is int else _DECIMAL).fullmatch(word):
        raise ValueError("is no whole number" if kind is int else "is no number")
    value = kind(word)
    if (least is not None and value < least) or (above is not None and value <= above) or value > most:
        low = f"at least {least:g}" if least is not None else f"above {above:g}" if above is not None else ""
        bounds = " and ".join(filter(None, (low, f"at most {most:g}" if most < math.inf else "")))
        raise ValueError(f"is out of range: give numbers, each {bounds}")
    if value in (math.inf, -math.inf):
        raise ValueError("is too large")
    return value


def layers(option: str, text: str) -> str | tuple[int, ...] | None:
    """ "all", numbers from 0, or None for an empty text."""
    return "all" if text.strip() == "all" else numbers(option, text, int, least=0, empty=True) or None


def shares(option: str, text: str) -> tuple[float, ...]:
    """Parts of a whole: above 0, at most 1."""
    return numbers(option, text, float, above=0, most=1, such_as="0.15,0.5")


def tokens(word: str) -> int | str:
    """A number of tokens from 0, or "all". Raises ValueError."""
    return word if word == "all" else number(word, int, least=0)


def operators(option: str, text: str) -> tuple[str, ...]:
    """Operators of a list, each NAME or NAME@VALUE."""
    from kvnotes_interp import operators as known

    return read_list(option, text, lambda word: known.find(word).name, such_as="no_recompute,splice@8")


def compactors(option: str, text: str) -> tuple[str, ...]:
    """Compactors of a list, each NAME or NAME@VALUE."""
    from kvnotes_interp.operators import eviction

    return read_list(option, text, lambda word: eviction.find(word).name, such_as="streaming,snapkv")


def wording(option: str, word: str) -> str:
    """One of WORDINGS, or a text with {value}, and {label} if it likes. Raises InputError for another."""
    if word in WORDINGS:
        return word
    try:
        filled = "{value}" in check_text(word, option) and word.format(label="", value="") is not None
    except (LookupError, ValueError, AttributeError):
        filled = False
    if not filled:
        raise InputError(
            f"{option} {word!r}: choose from {', '.join(WORDINGS)}, or write a text with {{value}} (and {{label}})."
            f"{nearest(word, WORDINGS)}"
        )
    return word


def choice(option: str, word: str, choices: tuple[str, ...]) -> str:
    """`word`. Raises InputError with the nearest choice when it is none of them."""
    if word not in choices:
        raise InputError(f"{option} {word!r}: choose from {', '.join(choices)}.{nearest(word, choices)}")
    return word
