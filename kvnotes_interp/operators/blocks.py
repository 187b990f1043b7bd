"""Blocks: one prompt as reusable pieces of token ids, cut so that the pieces and the joint text agree.

The joint text is tokenised once and cut by character offsets, so that every operator sees the same tokens in the same
slots. A token that holds text of two pieces belongs to neither: it is refused, or shown and given to the later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from kvnotes_interp.errors import InputError
from kvnotes_interp.files import check_text
from kvnotes_interp.tasks.encode import PART, EncodedPair, texts_of

Cut = Literal["sentences", "documents"]

_CLOSERS = "\"'”’»)]}）］｝」』】》〉〕"
_STOPS = (".", "!", "?", "。", "．", "！", "？", "｡")


@dataclass(frozen=True)
class Blocks:
    """Token ids of one prompt: `prefix`, the chunks that may be reused, and the `suffix` that is always run anew.

    Their concatenation is the prompt. The prefix may be empty; a chunk and the suffix may not.
    """

    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    suffix: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", tuple(self.prefix))
        object.__setattr__(self, "chunks", tuple(tuple(chunk) for chunk in self.chunks))
        object.__setattr__(self, "suffix", tuple(self.suffix))
        empty = [i for i, chunk in enumerate(self.chunks) if not chunk]
        if not self.chunks or empty:
            which = f"chunk {empty[0]} of {len(self.chunks)} is empty" if empty else "there is no chunk"
            raise InputError(f"{which}: blocks need at least one chunk, and every chunk at least one token.")
        if not self.suffix:
            raise InputError("the suffix is empty: the decision is read at its last token, so it needs at least one.")

    def __len__(self) -> int:
        """Tokens of the whole prompt."""
        return self.n_context + len(self.suffix)

    @property
    def n_context(self) -> int:
        """Tokens of prefix and chunks: what an operator's cache holds."""
        return len(self.prefix) + sum(map(len, self.chunks))

    @property
    def context(self) -> tuple[int, ...]:
        """Token ids of prefix and chunks."""
        return self.prefix + tuple(token for chunk in self.chunks for token in chunk)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the whole prompt."""
        return self.context + self.suffix

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Slots `[start, stop)` of every chunk."""
        out, start = [], len(self.prefix)
        for chunk in self.chunks:
            out.append((start, start + len(chunk)))
            start += len(chunk)
        return tuple(out)


@dataclass(frozen=True)
class CutText:
    """A text cut into blocks.

    Attributes:
        blocks: the token ids.
        answer: ids of the answer as it follows the prompt; empty when none was given.
        tokens: the text of each token of the prompt, see `tasks.encode.texts_of`.
        straddling: one line per boundary whose token holds text of both sides, with both tokenisations.
        alone_differs: pieces (0: prefix, 1...: chunks, last: suffix) that tokenise otherwise when they stand alone.
            The blocks hold the joint tokens, so all operators see the same; a store of chunks made elsewhere would not.
    """

    blocks: Blocks
    answer: tuple[int, ...]
    tokens: tuple[str, ...]
    straddling: tuple[str, ...] = ()
    alone_differs: tuple[int, ...] = ()


def cut_texts(
    tokenizer: Any,
    prefix: str,
    documents: Sequence[str],
    suffix: str,
    *,
    answer: str = "",
    straddle: Literal["refuse", "show"] = "refuse",
    add_special_tokens: bool = True,
) -> CutText:
    """Tokenise `prefix + documents + suffix` once and cut it by offsets.

    Args:
        tokenizer: a transformers tokenizer with character offsets (a "fast" one).
        answer: what follows the suffix, leading space included; its ids are returned as they follow the prompt.
        straddle: what to do with a token that holds text of two pieces: "refuse" it, or give it to the later piece and
            "show" it in `straddling`.
        add_special_tokens: let the tokenizer put its BOS token in front (into the prefix). Off for rendered chats.

    Raises:
        InputError: a token straddles a boundary (both tokenisations are printed), a document is empty, the tokenizer
            gives no offsets or adds tokens behind the text, or the answer changes the prompt's last token.
    """
    if straddle not in ("refuse", "show"):
        raise InputError(f'straddle={straddle!r}: choose "refuse" or "show".')
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"{type(tokenizer).__name__} gives no character offsets; load it with use_fast=True.")
    pieces = (prefix, *documents, suffix)
    text = "".join(pieces)
    check_text(text + answer, "the prompt and its answer")
    owner_of = [i for i, piece in enumerate(pieces) for _ in piece]
    batch = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    ids = [int(i) for i in batch["input_ids"]]
    tokens, _ = texts_of(tokenizer, text, ids, batch["offset_mapping"])
    owners: list[int] = []
    straddling: list[str] = []
    for place, ((start, stop), added) in enumerate(
        zip(batch["offset_mapping"], batch["special_tokens_mask"], strict=True)
    ):
        if added and start == stop:
            if owners and owners[-1] > 0:
                raise InputError(
                    f"this tokenizer puts {tokens[place]!r} behind plain text; the decision is read at the prompt's "
                    "last token. Pass add_special_tokens=False."
                )
            owners.append(0)
            continue
        # Trimmed offsets leave (end, end) for a token of spaces, hence max and end - 1.
        last = owner_of[max(stop - 1, 0)]
        if owner_of[min(start, stop - 1) if stop else 0] != last:
            straddling.append(_both(tokenizer, tokens, place, pieces, last))
        owners.append(last)
    if straddling and straddle == "refuse":
        raise InputError(
            "a token holds text of two pieces, so the joint text and the pieces do not agree:\n  "
            + "\n  ".join(straddling)
            + '\nCut where a newline ends one piece and a letter begins the next, or pass straddle="show".'
        )
    parts = [tuple(i for i, owner in zip(ids, owners, strict=True) if owner == n) for n in range(len(pieces))]
    alone = [tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else [] for piece in pieces]
    lead = sum(1 for mask in batch["special_tokens_mask"] if mask)  # a BOS in front is no difference
    differs = tuple(n for n, part in enumerate(parts) if list(part[lead if n == 0 else 0 :]) != [*map(int, alone[n])])
    return CutText(
        Blocks(parts[0], tuple(parts[1:-1]), parts[-1]),
        _answer_ids(tokenizer, text, ids, answer, add_special_tokens) if answer else (),
        tokens,
        tuple(straddling),
        differs,
    )


def _both(tokenizer: Any, tokens: Sequence[str], place: int, pieces: Sequence[str], later: int) -> str:
    """The joint tokens round a straddling one, beside the end of one piece and the start of the next alone."""
    alone = [
        [str(tokenizer.decode([i])) for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]
        for piece in (pieces[later - 1], pieces[later])
    ]
    return (
        f"between piece {later - 1} and {later}: together {list(tokens[max(place - 2, 0) : place + 3])}, "
        f"alone {alone[0][-2:]} and {alone[1][:3]}"
    )


def _answer_ids(tokenizer: Any, text: str, ids: Sequence[int], answer: str, special: bool) -> tuple[int, ...]:
    joint = [int(i) for i in tokenizer(text + answer, add_special_tokens=special)["input_ids"]]
    if joint[: len(ids)] != list(ids) or len(joint) == len(ids):
        seen = [tokenizer.decode([i]) for i in joint[max(len(ids) - 3, 0) :]]
        raise InputError(
            f"the answer {answer!r} changes the tokens of the prompt it follows: "
            f"{[tokenizer.decode([i]) for i in ids[-3:]]} becomes {seen}. End the suffix without a space and begin the "
            "answer with one."
        )
    return tuple(joint[len(ids) :])


def cut_pair(
    pair: EncodedPair, *, side: Literal["old", "new"] = "old", blocks: Cut = "sentences", min_tokens: int = 4
) -> Blocks:
    """A counterfactual pair's prompt as sentences or documents: prefix, chunks, and the decision text.

    The suffix is the trailing run of decision and chat-template tokens.

    "sentences": the prefix is every whole sentence before the one that holds the field (and a BOS token); it may be
    empty. A sentence ends behind a delimiter token that ends in a full stop, "!" or "?" (the Chinese ones, too) or
    holds a newline, with closing quotes and blank tokens that follow it, and never inside a character; one of fewer
    than `min_tokens` tokens is joined to the next (the last one to the one before).

    "documents": one chunk per document, whole, and one per stretch of text between or behind documents; what stands
    before the first is the prefix. A prompt without documents has the prefix of "sentences", and one chunk that holds
    the field and all that follows it: what can be concluded from the field can be written inside that chunk.

    Raises InputError on a wrong choice, and when nothing is left between prefix and suffix.
    """
    if side not in ("old", "new"):
        raise InputError(f'side={side!r}: choose "old" or "new".')
    if blocks not in ("sentences", "documents"):
        raise InputError(f'blocks={blocks!r}: choose "sentences" or "documents".')
    ids, tokens = (pair.old_ids, pair.tokens_old) if side == "old" else (pair.new_ids, pair.tokens_new)
    stop = decision_start(pair)
    whole = blocks == "documents"
    cuts = _document_cuts(pair, stop) if whole else []
    if not cuts:
        cuts = _sentence_cuts(pair, tokens, stop, min_tokens=stop if whole else min_tokens)
    chunks = tuple(ids[a:b] for a, b in pairwise(cuts) if b > a)
    if not chunks:
        raise InputError(f'Pair "{pair.pair.key}": no text stands between the prefix and the decision text.')
    return Blocks(ids[: cuts[0]], chunks, ids[stop:])


def _document_cuts(pair: EncodedPair, stop: int) -> list[int]:
    """Slots where documents, and stretches between them, begin, and `stop`; empty where there is no document."""
    owners = pair.documents[:stop]
    first = next((place for place, owner in enumerate(owners) if owner >= 0), stop)
    changes = [place for place in range(first + 1, stop) if owners[place] != owners[place - 1]]
    return [first, *changes, stop] if first < stop else []


def _sentence_cuts(pair: EncodedPair, tokens: Sequence[str], stop: int, *, min_tokens: int) -> list[int]:
    """Slots where chunks begin, the one that holds the field first, and `stop`."""
    begin = 0
    while begin < stop and pair.anchors[begin].startswith("special:"):
        begin += 1
    ends = _sentence_ends(tokens, pair.delimiter, begin, stop)
    begin = max((end for end in ends if end <= pair.field[0]), default=begin)
    cuts = [begin]
    for end in (end for end in ends if end > begin):
        if end - cuts[-1] >= min_tokens:
            cuts.append(end)
    if cuts[-1] != stop:
        if stop - cuts[-1] >= min_tokens or len(cuts) == 1:
            cuts.append(stop)
        else:
            cuts[-1] = stop
    return cuts


def decision_start(pair: EncodedPair) -> int:
    """Slot where the closing run of decision and chat-template tokens begins."""
    start = pair.length - 1
    while start > 0 and pair.regions[start - 1] in ("decision", "template"):
        start -= 1
    return start


def _sentence_ends(tokens: Sequence[str], delimiter: Sequence[bool], begin: int, stop: int) -> list[int]:
    """Slots behind which a sentence ends, rising; `stop` is not among them unless a delimiter ends there."""
    ends: list[int] = []
    first = begin
    for place in range(begin, stop):
        if tokens[place].endswith(PART) and place + 1 < stop:
            continue  # part of a character: the token that ends it is read with this one
        text, marked = "".join(tokens[first : place + 1]).replace(PART, ""), all(delimiter[first : place + 1])
        trailing = bool(ends) and ends[-1] == first and marked and not text.strip().strip(_CLOSERS)
        closing = marked and ("\n" in text or text.strip().rstrip(_CLOSERS).endswith(_STOPS))
        first = place + 1
        if trailing:
            ends[-1] = place + 1
        elif closing:
            ends.append(place + 1)
    return ends
