"""When the worker asks for more groups beside those that run, and when it holds back."""

import trio

ASK_AGAIN_S = 1.0
"""After a request for work, before another for less than half of the groups: short ones share requests."""


class LeasePacing:
    """Of an engine that runs so many groups at once."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._pause_ends = self._refusal_ends = self._asked = 0.0

    @property
    def pause_s(self) -> float:
        """How much longer to hold back."""
        return max(0.0, self._pause_ends - trio.current_time())

    def pause(self, seconds: float) -> None:
        """Ask for no work for so long; what is being sampled goes on."""
        self._pause_ends = trio.current_time() + seconds

    def refused(self, seconds: float) -> None:
        """Ask for no more beside what runs for so long; once nothing runs there may be a newer version to ask for."""
        self._refusal_ends = trio.current_time() + seconds

    def room(self, running: int) -> int:
        """Groups to ask for."""
        return self._groups - running

    def asked(self) -> None:
        """A request was answered."""
        self._asked = trio.current_time()

    def is_due(self, running: int) -> bool:
        """Whether to ask now: half of the groups have ended, or some, and it is a while since the last request."""
        due = self._asked if running <= self._groups // 2 else self._asked + ASK_AGAIN_S
        return self.room(running) > 0 and trio.current_time() >= max(due, self._pause_ends, self._refusal_ends)
