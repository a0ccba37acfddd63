"""Task processes: a few children that judge or play, are killed when they misbehave, and are replaced.

- `judge` either returns a reward for every completion or raises `VerifierFailed` with the reason: a timeout, a crash,
  out of memory, an exception, or an invalid answer. In all these cases the child is killed, and the next question gets
  another.
- If a child does not start, or reports that it can judge nothing for now, `VerifierDown` is raised: this is no fault of
  any completion.
- Children start at different times, and each loads the operator's files then. If a file has changed since the pool was
  made, a warning is logged once.
- The answer of a child is not trusted: its length is bounded, and every number is checked again.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from coordinator.environments.host import TurnQuestion
from coordinator.environments.interface import Observation
from coordinator.tasks import sandbox
from coordinator.tasks.problem_file import to_value
from coordinator.tasks.reward_functions import SCORE_MAX, Job, is_observation, unsound
from coordinator.tasks.task_process import ANSWER_MAX_BYTES, LENGTH, TaskProcessSpec, pack
from protocol import limits
from protocol.errors import VerifierDown, VerifierFailed
from protocol.tasks import Reward

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""The time for the imports of the functions, on a busy machine."""

LAST_WORDS_BYTES = 2048
"""The bytes of a child's standard error that are kept, for the reason."""

PRINTED_MAX_BYTES = 64 * limits.MIB
"""The most that functions may print for one group: reading it is the coordinator's work."""

COMPONENTS_MAX = 64

HOMES_MAX = 65_536
"""Groups whose process is remembered; the episodes of others are played again."""

T = TypeVar("T")

REASON_MAX_CHARS = 400


@dataclass(frozen=True)
class EpisodeAnswer:
    """An environment's answer to the last turns of a sample."""

    read: tuple[Observation | None, ...]
    """The text to read after each turn that was played now; None if the last one ended the episode."""
    reward: Reward | None
    """The reward, if the episode is over."""


@dataclass
class _Place:
    """The place of a child; its questions come one after the other."""

    lock: asyncio.Lock
    waiting: int = 0
    child: "_Child | None" = None


class TaskPool:
    """The task processes, as many as the operator allows; each is started when it is first needed."""

    def __init__(self, spec: TaskProcessSpec) -> None:
        self._spec = spec
        self._places = [_Place(asyncio.Lock()) for _ in range(spec.processes)]
        self._homes: OrderedDict[str, _Place] = OrderedDict()
        """The place with the running episodes of a group."""
        self.gaps: set[str] = set()
        """The parts of the sandbox that this machine lacks, as far as they are known."""
        self._loaded = {path: _digest(path) for path in spec.files}
        """The operator's files, as they were first."""
        if spec.sandbox:
            sandbox.log_gaps(sandbox.missing_here(), self.gaps)

    async def judge(self, job: Job) -> list[Reward]:
        """Return the rewards of completions."""
        place = min(self._places, key=lambda place: place.waiting)
        return await self._ask(place, lambda child: child.judge(job, self._spec.timeout_s))

    async def play(self, asked: TurnQuestion) -> list[EpisodeAnswer | None]:
        """Return an environment's answers to the last turns of a group's samples.

        A group stays in its process: elsewhere its episodes would be played again.
        """
        place = self._homes.get(asked.key) or min(self._places, key=lambda place: place.waiting)
        self._homes[asked.key] = place
        self._homes.move_to_end(asked.key)
        while len(self._homes) > HOMES_MAX:
            self._homes.popitem(last=False)
        return await self._ask(place, lambda child: child.play(asked, self._spec.timeout_s))

    @property
    def printed(self) -> str:
        """The last text that functions printed, of children that have not ended."""
        return "".join(place.child.last_words for place in self._places if place.child)

    async def close(self) -> None:
        for place in self._places:
            child, place.child = place.child, None
            if child is not None:
                await child.end()

    async def _ask(self, place: _Place, question: "Callable[[_Child], Awaitable[T]]") -> T:
        place.waiting += 1
        try:
            async with place.lock:
                child = place.child or await self._start()
                place.child = None
                try:
                    answer = await question(child)
                except VerifierDown:
                    place.child = child
                    raise
                except BaseException:
                    await child.end()
                    raise
                place.child = child
                return answer
        finally:
            place.waiting -= 1

    async def _start(self) -> "_Child":
        child = await _Child.start(self._spec, self.gaps)
        for path in [path for path, digest in self._loaded.items() if _digest(path) != digest]:
            log.warning(
                "%s has changed since the start: processes that start now load the new version, others keep the old "
                "one. Stop `launch` and start it again.",
                path,
            )
            del self._loaded[path]
        return child


def _digest(path: Path) -> str:
    """Return the digest of a file; "" if it cannot be read."""
    try:
        return blake3(path.read_bytes()).hexdigest()
    except OSError:
        return ""


class _Child:
    def __init__(self, process: Process, scratch: Path) -> None:
        self._process, self._scratch = process, scratch
        self._last_words = b""
        self._printed_bytes = 0
        self._listening = asyncio.create_task(self._listen())

    @staticmethod
    async def start(spec: TaskProcessSpec, gaps: set[str]) -> "_Child":
        """Start a child, and return it when it has loaded its functions; add the gaps of its sandbox to `gaps`."""
        scratch = sandbox.make_scratch()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "coordinator.tasks.task_child"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,
                env=spec.seen(os.environ, scratch),
            )
        except OSError as error:  # no memory, no file descriptor, no process left
            sandbox.remove_scratch(scratch)
            raise VerifierDown(f"No task process can be started: {error}.") from error
        child = _Child(process, scratch)
        try:
            ready = await child._ask(spec.for_child(scratch), START_TIMEOUT_S)
        except VerifierFailed as failure:
            await child.end()
            raise VerifierDown(f"The task process did not start: {failure.detail}") from failure
        except BaseException:
            await child.end()
            raise
        if "ready" not in ready:
            await child.end()
            reason, hint = (str(each)[:REASON_MAX_CHARS] for each in (ready.get("error", ready), ready.get("hint", "")))
            raise VerifierDown(f"The reward functions cannot be loaded: {reason}", hint=hint)
        sandbox.log_gaps(ready.get("missing"), gaps)
        return child

    async def judge(self, job: Job, timeout_s: float) -> list[Reward]:
        question = {
            "problem": to_value(job.problem),
            "completions": list(job.completions),
            "tokens": [list(tokens) for tokens in job.tokens],
            "timeout_s": timeout_s,
        }
        answer = await self._ask(question, timeout_s, " (reward.timeout_s)")
        _require_judged(answer)
        return checked(answer.get("rewards"), [len(text) for text in job.completions])

    async def play(self, asked: TurnQuestion, timeout_s: float) -> list[EpisodeAnswer | None]:
        question = {
            "problem": to_value(asked.problem),
            "key": asked.key,
            "turns": [None if turns is None else list(turns) for turns in asked.turns],
            "over": list(asked.over),
            "timeout_s": timeout_s,
        }
        answer = await self._ask(question, timeout_s, " (reward.timeout_s)")
        _require_judged(answer)
        return checked_episodes(answer.get("episodes"), asked)

    async def end(self) -> None:
        """Kill the child, and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._listening.cancel()
        with suppress(asyncio.CancelledError):
            await self._listening
        sandbox.remove_scratch(self._scratch)
        # asyncio keeps the pipes' transports until they are closed.
        self._process._transport.close()  # type: ignore[attr-defined]  # there is no public way

    async def _ask(self, question: dict[str, Any], timeout_s: float, setting: str = "") -> dict[str, Any]:
        """Return the child's answer to a question; `setting` names in the error what sets `timeout_s`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._printed_bytes = 0
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(pack(question))
                await self._process.stdin.drain()
                (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
                if length > ANSWER_MAX_BYTES:
                    raise VerifierFailed(f"Its answer has {length} bytes; at most {ANSWER_MAX_BYTES} are allowed.")
                answer = json.loads(await self._process.stdout.readexactly(length))
        except TimeoutError:
            raise VerifierFailed(f"It did not answer within {timeout_s:g} s{setting}.") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._why_it_ended() from None
        except (ValueError, RecursionError):
            raise VerifierFailed("Its answer is not JSON.") from None
        if not isinstance(answer, dict):
            raise VerifierFailed("Its answer is not a JSON object.")
        return answer

    @property
    def last_words(self) -> str:
        """The end of the child's standard error, to which all that functions print goes."""
        return self._last_words.decode(errors="replace")

    async def _why_it_ended(self) -> VerifierFailed:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # it closed its pipe; if it does not end, it is killed
                await self._process.wait()
        code = self._process.returncode
        if self._printed_bytes > PRINTED_MAX_BYTES:
            return VerifierFailed(f"It printed more than {PRINTED_MAX_BYTES // limits.MIB} MiB for one group.")
        how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        last = self.last_words.strip().rpartition("\n")[2]
        reason = f"It {how}. {sandbox.explained_signal(-(code or 0))}".strip()
        return VerifierFailed(reason, detail=f"{reason} {last}".strip()[:REASON_MAX_CHARS])

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(limits.MIB):
            self._last_words = (self._last_words + data)[-LAST_WORDS_BYTES:]
            self._printed_bytes += len(data)
            if self._printed_bytes > PRINTED_MAX_BYTES:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)


def _require_judged(answer: dict[str, Any]) -> None:
    if "error" in answer:
        public, detail = (str(answer.get(name, ""))[:REASON_MAX_CHARS] for name in ("error", "detail"))
        raise VerifierFailed(public, detail=detail)
    if "down" in answer:
        raise VerifierDown(str(answer["down"])[:REASON_MAX_CHARS], hint=str(answer.get("hint", ""))[:REASON_MAX_CHARS])


def checked(said: Any, sizes: Sequence[int]) -> list[Reward]:
    """Return the rewards in an answer about completions with `sizes` characters; refuse any other answer."""
    if not isinstance(said, list) or len(said) != len(sizes):
        raise VerifierFailed(f"Its answer does not have {len(sizes)} rewards.")
    return [_reward(row, size) for row, size in zip(said, sizes, strict=True)]


def checked_episodes(said: Any, asked: TurnQuestion) -> list[EpisodeAnswer | None]:
    """Return the answers about the episodes that were asked for; refuse anything else."""
    if not isinstance(said, list) or len(said) != len(asked.turns):
        raise VerifierFailed(f"Its answer does not have {len(asked.turns)} episodes.")
    return [
        None if turns is None else _episode(episode, turns, over=over)
        for episode, turns, over in zip(said, asked.turns, asked.over, strict=True)
    ]


def _episode(said: Any, turns: Sequence[str], *, over: bool) -> EpisodeAnswer:
    match said:
        case {"read": list() as read, "reward": list() | None as reward} if (
            len(read) <= len(turns)
            and all(map(is_observation, read[:-1]))
            and all(said is None or is_observation(said) for said in read[-1:])
            and (reward is not None) == (over or not read or read[-1] is None)
        ):
            return EpisodeAnswer(tuple(read), None if reward is None else _reward(reward, 0))
    raise VerifierFailed(
        "The environment's answer to a turn is neither text, nor messages with text, nor None for the end."
    )


def _reward(said: Any, size: int) -> Reward:
    match said:
        case [
            int() | float() as score,
            "ok" | "invalid" as status,
            dict() as components,
            int() | float() as weight,
            list() as skip,
        ] if _sound(score, components) and all(map(_is_span, skip)):
            spans = tuple((int(start), int(end)) for start, end in skip)
            if not unsound(weight, spans, size):
                parts = {str(name): float(value) for name, value in components.items()}
                return Reward(float(score), status, parts, weight=float(weight), skip=spans)
    raise VerifierFailed("Its answer contains an invalid reward.")


def _is_span(said: Any) -> bool:
    return isinstance(said, list) and len(said) == 2 and all(type(end) is int for end in said)


def _sound(score: float, components: dict[str, Any]) -> bool:
    values: Sequence[Any] = (score, *components.values())
    # NaN compares as False; an integer too large for a float is compared without a conversion.
    return len(components) <= COMPONENTS_MAX and all(
        isinstance(value, int | float) and abs(value) <= SCORE_MAX for value in values
    )
