"""What a probe over blocks works on: counterfactual pairs or document questions, cut into blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import Blocks, cut_pair, cut_texts
from kvnotes_interp.probes.request import TOO_LONG, once
from kvnotes_interp.tasks import EncodedPair, Pair, encode_all
from kvnotes_interp.tasks.documents.question import Question

if TYPE_CHECKING:
    from kvnotes_interp.model import Model

ONE_BLOCK = "one block only"


@dataclass(frozen=True)
class Item:
    """One prompt in blocks.

    Attributes:
        key, content, family, kind, split: as in the tables; `kind` is a pair's, or "question".
        blocks: the prompt. moved: indices of the chunks that stand behind something, which is where operators differ.
        answer: ids of the right answer as it follows the prompt (a pair: its first token).
        answers: the right answer and its aliases, as texts. stops: texts that end a greedy answer.
        tokens: of the prompt, decoded.
        pair: the encoded pair that this prompt is the old side of; None for a question.
    """

    key: str
    content: str
    family: str
    kind: str
    split: str
    blocks: Blocks
    answer: tuple[int, ...]
    answers: tuple[str, ...]
    stops: tuple[str, ...]
    tokens: tuple[str, ...]
    pair: EncodedPair | None = None

    @property
    def moved(self) -> tuple[int, ...]:
        return tuple(i for i, (start, _) in enumerate(self.blocks.spans) if start > 0)


def items_of(
    model: Model,
    given: Iterable[Pair] | Iterable[Question] | Pair | Question,
    *,
    straddle: Literal["refuse", "show"] = "refuse",
) -> tuple[list[Item], list[dict[str, Any]]]:
    """(items, lines of the pairs table for what was set aside).

    A pair is cut at its sentences (`operators.cut_pair`, old prompt), a question at its documents. Set aside are pairs
    that do not encode, and prompts with a single block at slot 0: nothing in them is reused out of its place.

    Raises InputError for no or mixed sources, a model without a tokenizer, and a question whose pieces do not agree
    with the joint text (see `operators.cut_texts`).
    """
    if model.tokenizer is None:
        raise InputError(f"{model.name} was loaded without a tokenizer; pass kv.load(..., tokenizer=...).")
    sources = sources_of(given)
    pairs = [source for source in sources if isinstance(source, Pair)]
    questions = [source for source in sources if isinstance(source, Question)]
    if len(pairs) not in (0, len(sources)) or len(pairs) + len(questions) != len(sources):
        other = next((type(s).__name__ for s in sources if not isinstance(s, Pair | Question)), "both kinds")
        raise InputError(f"give pairs or document questions, one kind at a time (got {other}).")
    aside: list[dict[str, Any]] = []
    if pairs:
        encoded, refused = encode_all(model.tokenizer, pairs)
        aside += [{"pair": a.key, "content": a.content, "family": pairs[0].family, "reason": a.reason} for a in refused]
        items = [_of_pair(one) for one in encoded]
    else:
        items = [_of_question(model, one, straddle) for one in questions]
    good = []
    for item in items:
        too_long = model.n_positions is not None and len(item.blocks) > model.n_positions
        reason = TOO_LONG if too_long else "" if item.moved else ONE_BLOCK
        if not reason:
            good.append(item)
            continue
        line = {"pair": item.key, "content": item.content, "family": item.family, "kind": item.kind}
        aside.append({**line, "split": item.split, "length": len(item.blocks), "reason": reason})
    return good, [{**line, "competent": False} for line in aside]


def sources_of(
    given: Iterable[Pair] | Iterable[Question] | Pair | Question, what: str = "pairs or questions"
) -> list[Any]:
    """Pairs or questions as a list; one alone, or a generator, will do. Raises InputError for none, or one twice."""
    sources = [given] if isinstance(given, Pair | Question) else list(given)
    if not sources:
        raise InputError(f"no {what} were given; take some from tasks.load or tasks.documents.load.")
    once([source for source in sources if isinstance(source, Pair | Question)])
    return sources


def _of_pair(encoded: EncodedPair) -> Item:
    source = encoded.pair
    return Item(
        source.key,
        source.content,
        source.family,
        source.kind,
        source.split,
        cut_pair(encoded),
        (encoded.answer_old_id,),
        (source.answer_old,),
        (),
        encoded.tokens_old,
        encoded,
    )


def _of_question(model: Model, source: Question, straddle: Literal["refuse", "show"]) -> Item:
    cut = cut_texts(
        model.tokenizer, source.prefix, source.documents, source.suffix, answer=source.answer, straddle=straddle
    )
    return Item(
        source.key,
        source.content,
        source.family,
        "question",
        source.split,
        cut.blocks,
        cut.answer,
        (source.answer, *source.aliases),
        source.stops,
        cut.tokens,
    )
