"""Pairs to token ids: every prompt is tokenised once, and spans are found by character offsets.

A token belongs to the piece that holds its last character, so " market" belongs to the slot "market" although
its space was written by the literal before it. Nothing is padded: pairs whose prompts do not align are refused
with both tokenisations printed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from kvnotes_interp.errors import InputError, TokenLengthError
from kvnotes_interp.files import check_text
from kvnotes_interp.tasks.pair import Message, Pair, Piece, pieces_of

UNEQUAL_LENGTH = "unequal token length"
CROSSES_FIELD = "field merges with its neighbours"
SHARED_FIRST_TOKEN = "answers share first token"
ANSWER_MERGES = "answer merges with prompt"

PART = "\ufffd"
"""What a token decodes to that is part of a character."""

_OPENS: WeakKeyDictionary[Any, set[tuple[str, tuple[str, ...]]]] = WeakKeyDictionary()
"""Of each tokenizer the templates and orders of roles that were seen to open the model's turn."""


class PairError(InputError):
    """This pair cannot be used with this tokenizer. `reason` is a short fixed text that can be counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PairLengthError(PairError, TokenLengthError):
    """The old and the new prompt have different numbers of tokens."""


@dataclass(frozen=True)
class SetAside:
    """A pair that was not encoded, and why. `reason` is meant to be counted, `detail` to be read."""

    key: str
    content: str
    reason: str
    detail: str


@dataclass(frozen=True)
class EncodedPair:
    """A pair as token ids of equal length `L`. All per-token tuples have length `L`.

    Args:
        pair: where it came from.
        old_ids, new_ids: token ids; the last one is the decision position, `L - 1`.
        field: token span `[start, stop)` of the field; every position where the ids differ lies inside.
        answer_old_id, answer_new_id: the first token of each answer as it follows the prompt; they differ.
        tokens_old, tokens_new: the text of each token, see `texts_of`.
        regions: "before" (all before the field), "field", "context", "rule", "filler", "delimiter", "decision"
            or "template". Delimiters of the decision and template regions, and of other documents than the field's,
            keep those regions.
        delimiter: whether the token's text, stripped, is empty or all punctuation and symbols; a token that is part
            of a character counts as that character, and a special token is none.
        anchors: name of the token's place in the family's template, unique inside the prompt: the anchor of the
            piece and the offset counted from the piece's end, e.g. "place:-1".
        documents: number of the document that the token belongs to, -1 for none; empty counts as all -1.
        tail: how many tokens at the end are run anew on every cache; a cache holds the others.
    """

    pair: Pair
    old_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    field: tuple[int, int]
    answer_old_id: int
    answer_new_id: int
    tokens_old: tuple[str, ...]
    tokens_new: tuple[str, ...]
    regions: tuple[str, ...]
    delimiter: tuple[bool, ...]
    anchors: tuple[str, ...]
    documents: tuple[int, ...] = ()
    tail: int = 1

    @property
    def length(self) -> int:
        """Number of tokens of each prompt."""
        return len(self.old_ids)

    @property
    def downstream(self) -> tuple[int, int]:
        """Token span `[start, stop)` after the field and before the tail."""
        return (self.field[1], self.length - self.tail)


def encode(tokenizer: Any, pair: Pair) -> EncodedPair:
    """Tokenise a pair and check that its prompts and answers can be compared.

    Args:
        tokenizer: a transformers tokenizer with character offsets (a "fast" one).
        pair: from `tasks.load`.

    Raises:
        TokenLengthError: the two prompts have different numbers of tokens.
        InputError: the tokenizer has no offsets or no chat template, its template opens no answer, a BOS token stands
            twice, the field merges with its neighbours, the answers cannot be told apart by their first token, or the
            pair is none: no field, no change, an empty answer, or text that no tokenizer reads.
    """
    return _encode(tokenizer, pair, {})


def _encode(tokenizer: Any, pair: Pair, names: dict[int, str]) -> EncodedPair:
    """`names` keeps decoded tokens between pairs: decoding one at a time is the slow part."""
    _require_offsets(tokenizer)
    _check_pair(pair)
    old = _Tokenised(tokenizer, pair, _render(tokenizer, pair, pair.old), names)
    new = _Tokenised(tokenizer, pair, _render(tokenizer, pair, pair.new), names)
    start, stop = _field_span(pair, old, new)
    answer_old = _answer_id(tokenizer, pair, old, pair.answer_old)
    answer_new = _answer_id(tokenizer, pair, new, pair.answer_new)
    if answer_old == answer_new:
        raise PairError(
            SHARED_FIRST_TOKEN,
            f"{_name(pair)}: the answers {pair.answer_old!r} and {pair.answer_new!r} both begin with token "
            f"{tokenizer.decode([answer_old])!r} ({answer_old}), so the decision cannot be read from the next "
            "token. Use answers whose first tokens differ.",
        )
    documents = tuple(piece.document if piece else -1 for piece in old.owners)
    regions = tuple(
        _token_region(piece, flag and documents[place] == documents[start], place, start, stop)
        for place, (piece, flag) in enumerate(zip(old.owners, old.delimiter, strict=True))
    )
    return EncodedPair(
        pair=pair,
        old_ids=old.ids,
        new_ids=new.ids,
        field=(start, stop),
        answer_old_id=answer_old,
        answer_new_id=answer_new,
        tokens_old=old.tokens,
        tokens_new=new.tokens,
        regions=regions,
        delimiter=old.delimiter,
        anchors=_token_anchors(old.owners),
        documents=documents,
    )


def encode_all(tokenizer: Any, pairs: Iterable[Pair]) -> tuple[list[EncodedPair], list[SetAside]]:
    """Encode what can be encoded and say what was set aside and why.

    Faults of a single pair (unequal length, merged field or answer, shared first token) are collected; faults
    that every pair would have (no offsets, no chat template, double BOS) are raised as `InputError`.
    """
    encoded: list[EncodedPair] = []
    aside: list[SetAside] = []
    names: dict[int, str] = {}
    for pair in pairs:
        try:
            encoded.append(_encode(tokenizer, pair, names))
        except PairError as error:
            aside.append(SetAside(pair.key, pair.content, error.reason, str(error)))
    return encoded, aside


def is_delimiter(text: str) -> bool:
    """Whether a token's text, stripped, is empty or all punctuation and symbols ([N], token statistics).

    U+FFFD, which stands for part of a character or for one that cannot be read, is no punctuation. Of a token that may
    be part of a character ask `texts_of`, which knows the character.
    """
    return all(char != PART and unicodedata.category(char)[0] in "PS" for char in text.strip())


def texts_of(
    tokenizer: Any,
    text: str,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    names: dict[int, str] | None = None,
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """(the text of each token, whether it is a delimiter), from the characters at the tokens' offsets in `text`.

    A byte-level tokenizer cuts a character into several tokens, and each decodes to U+FFFD alone. Here the last of them
    has the character, those before it have U+FFFD, and all are delimiters exactly if the character is one. A special
    token is no delimiter.

    Args:
        names: decoded tokens by id, filled as needed: decoding one at a time is the slow part.
    """
    names = {} if names is None else names
    special, unknown = _special_ids(tokenizer), getattr(tokenizer, "unk_token_id", None)
    tokens: list[str] = []
    flags: list[bool] = []
    for place, (i, (start, stop)) in enumerate(zip(ids, offsets, strict=True)):
        if i not in names:
            names[i] = str(tokenizer.decode([i]))
        shown, held = names[i], text[start:stop]
        if i in special and i != unknown:
            token, flag = shown, False
        elif PART in shown or i == unknown:
            flag = is_delimiter(held)
            after = offsets[place + 1] if place + 1 < len(offsets) else (stop, stop)
            unfinished = bool(held) and after[0] < min(stop, after[1])
            ahead = shown[: len(shown) - len(shown.lstrip())]
            token = ahead + (held[:-1] + PART if unfinished else held).strip() + shown[len(shown.rstrip()) :]
        else:
            flag = is_delimiter(shown)
            # Offsets may leave blanks out (GPT-2), and so may decoding (SentencePiece); nothing makes one up.
            token = held if held.strip() == shown.strip() and len(held) > len(shown) else shown
        tokens.append(token)
        flags.append(flag)
    return tuple(tokens), tuple(flags)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = (int(i) for i, token in added.items() if getattr(token, "special", False))
    return frozenset((*getattr(tokenizer, "all_special_ids", ()), *marked))


class _Tokenised:
    """One prompt as ids, texts of tokens and, per token, the piece that owns it (None: a special token)."""

    def __init__(self, tokenizer: Any, pair: Pair, pieces: Sequence[Piece], names: dict[int, str]) -> None:
        self.pieces = tuple(pieces)
        self.text = "".join(piece.text for piece in pieces)
        # A rendered chat template already holds its special tokens; plain text gets them from the tokenizer.
        batch = tokenizer(self.text, add_special_tokens=not pair.chat, return_offsets_mapping=True)
        self.ids = tuple(int(i) for i in batch["input_ids"])
        offsets = [(int(start), int(stop)) for start, stop in batch["offset_mapping"]]
        self.tokens, self.delimiter = texts_of(tokenizer, self.text, self.ids, offsets, names)
        added = () if pair.chat else _added_tokens(tokenizer, self.ids)
        owner_of_char = [piece for piece in pieces for _ in piece.text]
        self.owners = tuple(
            # Trimmed offsets (GPT-2 style) leave (end, end) for a token of spaces, hence max and end - 1.
            None if place in added else owner_of_char[max(end - 1, 0)]
            for place, (_, end) in enumerate(offsets)
        )
        _check_specials(tokenizer, pair, self.ids, self.owners)


def _render(tokenizer: Any, pair: Pair, prompt: Iterable[Message | Piece]) -> list[Piece]:
    """The full text of one prompt as pieces, chat-template text included."""
    if not pair.chat:
        return list(pieces_of(prompt))
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f'Family "{pair.family}" is in chat form, but this tokenizer has no chat template. Load the family '
            f'with chat=False for a plain rendering: tasks.load("{pair.family}", chat=False).'
        )
    messages = [part for part in prompt if isinstance(part, Message)]
    opening: tuple[Piece, ...] = ()
    if messages and messages[-1].role == "assistant":
        opening = messages.pop().pieces
    if not messages:
        raise InputError(f'{_name(pair)} is in chat form and has no turn to answer; give a Message("user", pieces).')
    turns = [{"role": message.role, "content": message.text} for message in messages]
    try:
        rendered = _chat(tokenizer, turns, answer=True)
    except Exception as error:  # jinja2 errors differ by template; the text is what helps
        roles = ", ".join(message.role for message in messages)
        raise InputError(
            f'{_name(pair)}: the chat template refuses these roles ({roles}): {error}. Put the text into a "user" '
            "turn, or load the family with chat=False."
        ) from error
    pieces: list[Piece] = []
    cursor = 0
    for number, message in enumerate(messages):
        found = rendered.find(message.text, cursor)
        if found < 0:
            raise InputError(
                f"{_name(pair)}: the chat template changes the text of message {number} ({message.role}), so its "
                "tokens cannot be located. Load the family with chat=False."
            )
        if found > cursor:
            pieces.append(Piece(rendered[cursor:found], "template", f"template.{number}"))
        pieces.extend(message.pieces)
        cursor = found + len(message.text)
    _check_opens_answer(tokenizer, pair, turns, rendered)
    if cursor < len(rendered):
        pieces.append(Piece(rendered[cursor:], "template", f"template.{len(messages)}"))
    return [*pieces, *opening]


def _chat(tokenizer: Any, turns: list[dict[str, str]], *, answer: bool) -> str:
    """The conversation as text; `answer`: with what opens the model's turn."""
    # enable_thinking is read by Qwen3's template and ignored by the others.
    options = {"tokenize": False, "add_generation_prompt": answer, "enable_thinking": False}
    return tokenizer.apply_chat_template(turns, **options)


def _check_opens_answer(tokenizer: Any, pair: Pair, turns: list[dict[str, str]], rendered: str) -> None:
    """Raise InputError unless an answer follows `rendered` directly, so that the decision is read where it is due.

    A template that opens the model's turn on request does. One that gives the same text without the request does if an
    assistant's turn, added to the conversation, begins right behind that text ("[/INST]"). Asked once per tokenizer,
    template and order of roles.
    """
    known = _OPENS.setdefault(tokenizer, set())
    key = (repr(tokenizer.chat_template), tuple(turn["role"] for turn in turns))
    if key in known:
        return
    try:
        opens = _chat(tokenizer, turns, answer=False) != rendered
        if not opens:
            answered = _chat(tokenizer, [*turns, {"role": "assistant", "content": "x"}], answer=False)
            opens = answered.startswith(rendered) and answered[len(rendered) :].lstrip().startswith("x")
    except Exception:  # jinja2 errors differ by template, and each means that it cannot be verified
        opens = False
    if not opens:
        raise InputError(
            f'Family "{pair.family}" is in chat form, and this tokenizer\'s chat template ignores '
            "add_generation_prompt: it does not open the model's turn, so the decision would be read behind the end of "
            f"the user's ({rendered[-24:]!r}). Load the family with chat=False, or give the tokenizer another template."
        )
    known.add(key)


def _check_pair(pair: Pair) -> None:
    """Raise InputError for what is no counterfactual pair: checked here, since a pair may be built by hand."""
    name = f'Pair "{pair.key}" ({pair.family})'
    for side, prompt in (("old", pair.old), ("new", pair.new)):
        pieces = list(pieces_of(prompt))
        for piece in pieces:
            check_text(piece.text, f"{name}, {side} prompt, piece {piece.anchor}")
        fields = [piece.text for piece in pieces if piece.region == "field"]
        if not any(piece.text for piece in pieces):
            raise InputError(f"{name}: the {side} prompt is empty. Give it text: a field, and words after it.")
        if len(fields) != 1 or not fields[0]:
            found = f"has {len(fields)} pieces" if len(fields) != 1 else "has an empty piece"
            raise InputError(f'{name}: the {side} prompt {found} of region "field"; give one, with text.')
    for side, answer in (("old", pair.answer_old), ("new", pair.answer_new)):
        check_text(answer, f"{name}, answer_{side}")
        if not answer:
            raise InputError(f'{name}: answer_{side} is empty; give the text that follows the prompt, such as " yes".')
    if pair.old == pair.new:
        raise InputError(f"{name}: the old and the new prompt are the same; the field's two values must differ.")


def _field_span(pair: Pair, old: _Tokenised, new: _Tokenised) -> tuple[int, int]:
    """Token span of the field, the same in both prompts and holding every difference."""
    if len(old.ids) != len(new.ids):
        raise PairLengthError(
            UNEQUAL_LENGTH,
            f"{_name(pair)}: the old prompt has {len(old.ids)} tokens and the new one {len(new.ids)}.\n"
            f"  old field {pair.field_old!r}: {_around_field(old)}\n"
            f"  new field {pair.field_new!r}: {_around_field(new)}\n"
            "Choose two values that this tokenizer cuts into equally many tokens; nothing is padded.",
        )
    spans = [
        [place for place, piece in enumerate(side.owners) if piece and piece.region == "field"] for side in (old, new)
    ]
    differing = [place for place, (a, b) in enumerate(zip(old.ids, new.ids, strict=True)) if a != b]
    inside = spans[0] == spans[1] and set(differing) <= set(spans[0])
    if not differing:
        raise PairError(
            CROSSES_FIELD,
            f"{_name(pair)}: both values are the same tokens to this tokenizer: {_around_field(old)}. Choose others.",
        )
    if not inside or not spans[0]:
        raise PairError(
            CROSSES_FIELD,
            f"{_name(pair)}: old and new differ at token positions {differing}, but the field is at "
            f"{spans[0]} and {spans[1]}.\n  old: {_around_field(old)}\n  new: {_around_field(new)}\n"
            "Put a space or a newline between the field and its neighbours.",
        )
    if spans[0][-1] >= len(old.ids) - 1:
        raise PairError(
            CROSSES_FIELD,
            f"{_name(pair)}: nothing follows the field. Add text after it: a decision is read there.",
        )
    return spans[0][0], spans[0][-1] + 1


def _answer_id(tokenizer: Any, pair: Pair, prompt: _Tokenised, answer: str) -> int:
    """The token that follows the prompt when the answer is written after it."""
    joint = tokenizer(prompt.text + answer, add_special_tokens=not pair.chat)["input_ids"]
    if tuple(joint[: len(prompt.ids)]) != prompt.ids or len(joint) == len(prompt.ids):
        tail = [tokenizer.decode([i]) for i in prompt.ids[-3:]]
        seen = [tokenizer.decode([i]) for i in joint[max(len(prompt.ids) - 3, 0) :]]
        raise PairError(
            ANSWER_MERGES,
            f"{_name(pair)}: the answer {answer!r} changes the tokens of the prompt it follows: {tail} becomes "
            f"{seen}. End the prompt without a space and begin the answer with one.",
        )
    return int(joint[len(prompt.ids)])


def _token_region(piece: Piece | None, delimiter: bool, place: int, start: int, stop: int) -> str:
    if place < start:
        return "before"
    if place < stop:
        return "field"
    region = piece.region if piece else "template"
    if region in ("decision", "template"):
        return region
    if delimiter:
        return "delimiter"
    return "context" if region == "preamble" else region


def _token_anchors(owners: Sequence[Piece | None]) -> tuple[str, ...]:
    """Anchors counted from the end of each piece, so that line-final tokens line up between instances."""
    seen: dict[str, int] = {}
    anchors: list[str] = []
    for piece in reversed(owners):
        name = piece.anchor if piece else "special"
        seen[name] = seen.get(name, 0) + 1
        anchors.append(f"{name}:-{seen[name]}")
    return tuple(reversed(anchors))


def _require_offsets(tokenizer: Any) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"The tokenizer {type(tokenizer).__name__} gives no character offsets, which are needed to find the "
            "field. Load it with AutoTokenizer (use_fast=True)."
        )


def _added_tokens(tokenizer: Any, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Positions of the special tokens that the tokenizer itself puts before a plain prompt."""
    bare = len(tokenizer("x", add_special_tokens=False)["input_ids"])
    full = [int(i) for i in tokenizer("x", add_special_tokens=True)["input_ids"]]
    lead = len(full) - bare
    if full[:lead] != list(ids[:lead]):
        raise InputError(
            f"The tokenizer adds {tokenizer.decode(full)!r} around plain text; only special tokens in front of "
            "the prompt are supported, because the decision is read at the prompt's last token."
        )
    return tuple(range(lead))


def _check_specials(tokenizer: Any, pair: Pair, ids: tuple[int, ...], owners: Sequence[Piece | None]) -> None:
    """At most one BOS. A chat template may use the BOS token to open every turn (SmolLM2 does)."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return
    written = [i for i, piece in enumerate(owners) if ids[i] == bos and not (piece and piece.region == "template")]
    doubled = ids[:2] == (bos, bos)
    if doubled or len(written) > 1 or (pair.chat and written):
        raise InputError(
            f"{_name(pair)}: the prompt holds the BOS token {tokenizer.bos_token!r} more than once or inside its "
            "text. Take it out of the family's text: it is added once, by the tokenizer or the chat template."
        )


def _around_field(side: _Tokenised, context: int = 3) -> str:
    places = [i for i, piece in enumerate(side.owners) if piece and piece.region == "field"] or [0]
    first, last = max(places[0] - context, 0), places[-1] + 1 + context
    return f"{list(side.tokens[first:last])}, field {len(places)} tokens"


def _name(pair: Pair) -> str:
    return f'Pair "{pair.key}" ({pair.family}, {pair.field_old!r} -> {pair.field_new!r})'
