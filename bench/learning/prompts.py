"""Choice of the next problems: the round's own selection, on a store in memory."""

from collections.abc import Sequence

import sqlalchemy as sa

from coordinator.rules.lifecycle import GroupState
from coordinator.rules.prompt_refs import PromptRef
from coordinator.rules.selection import SelectionRules
from coordinator.store import tables
from coordinator.transactions import curriculum
from coordinator.transactions.curriculum import Prompt, source_of


class Prompts:
    """The train problems in the order in which a round leases them."""

    def __init__(self, rules: SelectionRules, prompt: Prompt) -> None:
        self._rules, self._prompt = rules, prompt
        self._store = sa.create_engine("sqlite://")
        tables.metadata.create_all(self._store)

    def next(self, count: int) -> list[PromptRef]:
        """Return the problems of the next `count` groups."""
        with self._store.begin() as connection:
            made = curriculum.make(connection, count, self._rules, self._prompt, GroupState.LEASED)
            return [source_of(connection, number) for number in made]

    def note(self, prompt: bytes, rewards: Sequence[float]) -> None:
        """A group of this prompt earned this."""
        if self._rules.chooses:
            with self._store.begin() as connection:
                curriculum.record_outcome(connection, prompt, rewards)
