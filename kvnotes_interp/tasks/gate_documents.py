"""Gated decisions inside documents: signal and rule stand in one log among others that hold nothing but neutral lines.

Texts, contents and splits are those of the family `gate`; what is new is the cut. The conclusion can be drawn inside
the one document, so a note of it can be written even where every document is compiled alone.
"""

from __future__ import annotations

import dataclasses
from random import Random

from kvnotes_interp.tasks.documents.question import make_key, whole_number
from kvnotes_interp.tasks.family import find
from kvnotes_interp.tasks.pair import Pair, Piece, Prompt, Split, pieces_of
from kvnotes_interp.tasks.sampling import count_instances, sample

KIND = "derived"
ABOUT = "A signal and the rule that names it stand in one log among others; the decision is due after all of them."
SOURCE = "family gate, its lines in documents of their own"


def gate_documents(
    *, n: int = 64, seed: int = 0, split: Split | None = None, documents: int = 3, lines: int = 4
) -> list[Pair]:
    """Pairs of the family `gate`, each laid out as several logs. Contents and splits are the family's.

    Every log begins with its desk and holds `lines` neutral lines; one of them, in a place drawn per pair, also holds
    the signal and behind it the rule, both before its neutral lines. The request belongs to the decision.

    Args:
        documents: number of logs, 1 to 8.
        lines: neutral lines of each; all logs together hold no more than the family has.

    Raises:
        InputError: a value is out of range.
    """
    file = find("gate")
    desks = [str(desk) for desk in file.spec.slots["desk"]]
    whole_number("documents", documents, least=1, most=len(desks))
    whole_number("lines", lines, least=0, most=len(file.filler_lines) // documents)
    pairs = sample(file, n=n, seed=seed, split=split, options={"fillers": documents * lines})
    return [_laid_out(pair, desks, documents, lines) for pair in pairs]


def counts() -> tuple[int, int]:
    """(instances, contents), those of the family `gate`."""
    return count_instances(find("gate"))


def _laid_out(pair: Pair, desks: list[str], documents: int, lines: int) -> Pair:
    rng = Random(f"gate_documents|{pair.key}")
    place = rng.randrange(documents)
    desk = next(piece.text for piece in pieces_of(pair.old) if piece.anchor == "desk")
    others = rng.sample([other for other in desks if other != desk], documents - 1)
    old, new = (_prompt(prompt, others, place, lines) for prompt in (pair.old, pair.new))
    texts = ["".join(piece.text for piece in prompt) for prompt in (old, new)]
    content = pair.content.partition(":")[2]
    key = make_key(f"gate_documents.{content}", *texts)
    return dataclasses.replace(
        pair, family="gate_documents", key=key, content=f"gate_documents:{content}", old=old, new=new
    )


def _prompt(prompt: Prompt, others: list[str], place: int, lines: int) -> tuple[Piece, ...]:
    """The family's pieces, cut into logs; the `place`-th is the one of signal and rule."""
    every = list(pieces_of(prompt))
    fillers = [piece for piece in every if piece.region == "filler"]
    first = next(i for i, piece in enumerate(every) if piece.region == "filler" or piece.text.startswith("Request"))
    head = every[:first]  # desk, signal, rule
    tail = [piece for piece in every[first:] if piece.region != "filler"]
    out: list[Piece] = []
    for number in range(len(others) + 1):
        own = fillers[number * lines : (number + 1) * lines]
        if number == place:
            out += [dataclasses.replace(piece, document=number) for piece in head]
            out += [Piece(piece.text, "context", f"own.line.{len(own) - i - 1}", number) for i, piece in enumerate(own)]
            continue
        side, away = ("earlier", place - number) if number < place else ("later", number - place)
        desk = others[number if number < place else number - 1]
        text = f"Log of the {desk} desk.\n" + "".join(piece.text for piece in own)
        out.append(Piece(text, "filler", f"{side}.{away - 1}", number))
    return (*out, *(dataclasses.replace(piece, region="decision") for piece in tail))
