"""What an edit starts from: the stale cache of the old prompt, and a field whose value has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvnotes_interp import engine
from kvnotes_interp.cache import KVCache
from kvnotes_interp.errors import InputError
from kvnotes_interp.operators.blocks import decision_start
from kvnotes_interp.tasks import EncodedPair

if TYPE_CHECKING:
    from kvnotes_interp.model import Model


@dataclass(frozen=True)
class Setting:
    """One pair before its edit.

    Attributes:
        stale: cache of the old prompt without its last token, the decision token, which every state runs anew.
        fresh: the same of the new prompt. A reference for rankings and oracle patches; whoever uses it pays for it.
    """

    model: Model
    pair: EncodedPair
    stale: KVCache
    fresh: KVCache

    @property
    def stop(self) -> int:
        """Number of slots before the decision token."""
        return self.pair.length - 1

    @property
    def field(self) -> tuple[int, ...]:
        """Slots of the field."""
        return tuple(range(*self.pair.field))

    @property
    def downstream(self) -> tuple[int, ...]:
        """Slots behind the field and before the decision token."""
        return tuple(range(self.pair.field[1], self.stop))

    @property
    def decision_start(self) -> int:
        """Slot where the closing run of decision and template tokens begins; texts about the field go before it."""
        start = decision_start(self.pair)
        if start < self.pair.field[1]:
            raise InputError(f'Pair "{self.pair.pair.key}": the field stands inside the decision text.')
        return start

    def new_ids(self, slots: tuple[int, ...]) -> list[int]:
        """Token ids of the new prompt at these slots."""
        return [self.pair.new_ids[slot] for slot in slots]


def open_setting(model: Model, pair: EncodedPair) -> Setting:
    """Prefill both prompts of a pair."""
    stop = pair.length - 1
    stale, fresh = (engine.prefill(model, list(ids[:stop])) for ids in (pair.old_ids, pair.new_ids))
    return Setting(model, pair, stale, fresh)
