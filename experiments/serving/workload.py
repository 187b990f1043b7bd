"""The requests: one long policy, a field that changes before every request, and three places to say so.

All prompts are made here from a seed; nothing is downloaded. The policy is numbered neutral rules, as many as the
wanted number of tokens asks for. What stands where:

    in_place   state (new value) | policy | request          all after the field is new to a cache
    erratum    state (first value) | policy | correction | request
    hoist      policy | state (new value) | request
    stale      state (first value) | policy | request        a control: nothing is told, so it bounds what can hit
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from random import Random
from typing import Literal, get_args

from kvnotes_interp.errors import InputError, nearest
from kvnotes_interp.tasks.family import neutral_lines

Arm = Literal["in_place", "erratum", "hoist", "stale"]
ARMS: tuple[Arm, ...] = get_args(Arm)
Values = Literal["fresh", "toggle"]
VALUES: tuple[Values, ...] = get_args(Values)

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""

ERRATUM = (
    "[STATE UPDATE] {field} has just changed to {value}; this overrides any earlier value. Apply the current value."
)
"""Notes, arXiv 2606.17107, first wording."""
FIELD = "account_balance"


@dataclass(frozen=True)
class Workload:
    """What is asked of a server.

    Args:
        policy_tokens: least length of the policy, in tokens; it ends with a whole rule. The paper's prompt has 8,066.
        requests: number of requests. The paper's: 96 per arm.
        values: "fresh", a value that was never there before, or "toggle", two values in turn.
        seed: of values and requests.
        salt: opens every prompt, so that two runs on one server share nothing.
    """

    policy_tokens: int = 8066
    requests: int = 96
    values: Values = "fresh"
    seed: int = 0
    salt: str = ""

    def __post_init__(self) -> None:
        if self.policy_tokens < 1 or self.requests < 1:
            raise InputError(f"policy_tokens={self.policy_tokens}, requests={self.requests}: both must be at least 1.")
        if self.values not in VALUES:
            raise InputError(
                f"values is {self.values!r}; choose from {', '.join(VALUES)}.{nearest(self.values, VALUES)}"
            )

    def texts(self, arm: Arm, encode: Encode) -> list[str]:
        """The prompts of an arm, in order."""
        if arm not in ARMS:
            raise InputError(f"there is no arm {arm!r}.{nearest(str(arm), ARMS)} Arms: {', '.join(ARMS)}.")
        rules, values = policy(self.policy_tokens, encode), self.field_values()
        head = f"{self.salt}You are the assistant of a store.\n"
        texts = []
        for number, value in enumerate(values):
            state = f"STATE\n{FIELD}: {values[0] if arm in ('erratum', 'stale') else value} USD\n\n"
            request = f"REQUEST\nOrder {_order(self.seed, number)}: may it be paid from the balance?\nDecision:"
            if arm == "hoist":
                texts.append(f"{head}{rules}{state}{request}")
            else:
                told = ERRATUM.format(field=FIELD, value=f"{value} USD") + "\n\n" if arm == "erratum" else ""
                texts.append(f"{head}{state}{rules}{told}{request}")
        return texts

    def prompts(self, arm: Arm, encode: Encode) -> list[tuple[int, ...]]:
        """The prompts of an arm as token ids."""
        return [tuple(int(i) for i in encode(text)) for text in self.texts(arm, encode)]

    def field_values(self) -> list[int]:
        """One value per request, four digits each; "fresh" values are all different."""
        drawn = Random(f"values|{self.seed}").sample(range(1000, 10000), max(2, self.requests))
        return [drawn[i % 2] if self.values == "toggle" else drawn[i] for i in range(self.requests)]


def policy(tokens: int, encode: Encode) -> str:
    """Numbered neutral rules of at least this many tokens."""
    lines = _rules()
    text, length, number = "POLICY\n", 0, 0
    while length < tokens:
        # The number keeps a rule from being repeated word for word.
        added = "".join(f"{n + 1}. {lines[n % len(lines)]}\n" for n in range(number, number + 8))
        number += 8
        text += added
        length += len(encode(added))
    return text + "\n"


def arrivals(n: int, rate: float, *, seed: int = 0) -> list[float]:
    """Seconds after the start at which each of `n` requests comes: a Poisson process of `rate` requests per second.

    The first comes at 0. An infinite rate sends all at once.
    """
    if not rate > 0:
        raise InputError(f"rate={rate}: give requests per second above 0, or inf for all at once.")
    draw = Random(f"arrivals|{seed}")
    times = [0.0]
    while len(times) < n:
        times.append(times[-1] + (0.0 if rate == float("inf") else draw.expovariate(rate)))
    return times[:n]


def _rules() -> list[str]:
    return neutral_lines(resources.files("kvnotes_interp.tasks") / "families" / "neutral_rules.txt")


def _order(seed: int, number: int) -> str:
    draw = Random(f"order|{seed}|{number}")
    return f"{draw.choice('ABCDEFGH')}{draw.randrange(1000, 10000)}"
