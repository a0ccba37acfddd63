"""A version goes out beside the loop: what may overlap, what waits, and where errors come out."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from transformers import Qwen3Config

from coordinator.learner import checkpoint
from coordinator.learner.algorithm import PRESETS
from coordinator.learner.client import CoordinatorClient
from coordinator.learner.outgoing import Outgoing
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.policy_folders import PolicyWriter
from coordinator.learner.settings import TrainSettings
from coordinator.model.batch import collate
from coordinator.model.watchdog import Watchdog
from protocol.errors import DiskFull, OutOfOrder
from protocol.policy import canary
from protocol.work.learning import KnownUploads
from tests.coordinator.answering import Answer, answering, error
from tests.coordinator.learner.groups import UNEQUAL
from tests.live_bytes import live_bytes
from tests.tiny_policy import make_other_policy

QWEN = Qwen3Config(
    vocab_size=320,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    head_dim=8,
    eos_token_id=2,
    tie_word_embeddings=True,
)
SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1, algorithm=PRESETS["echo2"])


class Gate:
    """A job that has begun, and ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = Event(), Event()

    def __call__(self) -> None:
        self.begun.set()
        self.may_end.wait()


def nothing() -> None:
    pass


def full() -> None:
    raise DiskFull("full")


@pytest.fixture
def outgoing() -> Iterator[Outgoing]:
    """Return an upload queue, which must be empty at the end."""
    made = Outgoing()
    yield made
    made.finish()


def test_weights_may_change_once_they_are_read_however_long_the_version_is_on_its_way(outgoing: Outgoing) -> None:
    sending, read = Gate(), list[str]()
    outgoing.start(lambda: read.append("read"), sending)
    outgoing.wait_until_read()
    assert read == ["read"]
    assert sending.begun.wait()
    outgoing.check()
    sending.may_end.set()


def test_weights_do_not_change_while_they_are_read(outgoing: Outgoing) -> None:
    reading, changed = Gate(), Event()

    def change() -> None:
        outgoing.wait_until_read()
        changed.set()

    outgoing.start(reading, nothing)
    changing = Thread(target=change)
    changing.start()
    assert reading.begun.wait()
    assert not changed.is_set()
    reading.may_end.set()
    changing.join()
    assert changed.is_set()
    assert outgoing.waited_s > 0


def test_one_version_at_a_time_in_their_order(outgoing: Outgoing) -> None:
    seen = list[str]()
    for name in ("one", "two"):
        outgoing.start(lambda name=name: seen.append(f"read {name}"), lambda name=name: seen.append(f"sent {name}"))  # type: ignore[misc]  # of mypy: defaults of a lambda
    outgoing.finish()
    assert seen == ["read one", "sent one", "read two", "sent two"]


@pytest.mark.parametrize("where", ["wait_until_read", "finish"])
def test_a_failed_write_is_raised_before_weights_change_and_nothing_is_sent(outgoing: Outgoing, where: str) -> None:
    sent = Event()
    outgoing.start(full, sent.set)
    with pytest.raises(DiskFull):
        getattr(outgoing, where)()
    outgoing.finish()
    assert not sent.is_set()


def test_a_failed_publication_is_raised_before_the_next_version_goes_out(outgoing: Outgoing) -> None:
    outgoing.start(nothing, full)
    with pytest.raises(DiskFull):
        outgoing.start(nothing, nothing)


def test_a_refused_version_ends_a_loop_that_waits_for_a_batch_that_will_never_come(
    outgoing: Outgoing, tmp_path: Path
) -> None:
    """Nodes wait for the version, and the learner for them."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    held, refused = Answer(200, KnownUploads(files=()).to_bytes()), error(OutOfOrder("not this one"))
    none_yet = [Answer(204)] * 1000
    with (
        answering(held, Answer(204), refused) as (sends, _),
        answering(*none_yet) as (waits, _),
        closing(CoordinatorClient(sends, "token")) as sender,
        closing(CoordinatorClient(waits, "token")) as waiter,
    ):
        outgoing.start(nothing, lambda: sender.publish(3, 6, tmp_path))
        with pytest.raises(OutOfOrder, match="not this one"):
            waiter.batch(7, outgoing.check)


def test_an_update_beside_the_writing_changes_no_byte_of_what_is_written(policy_folder: Path, tmp_path: Path) -> None:
    """All that reads the weights is held back until the backward pass is over; then the update waits for it.

    The disk syncs the checkpoint only after the update.
    """
    policy = TrainedPolicy(policy_folder, SETTINGS)
    policy.train_step(UNEQUAL)
    policy.save(tmp_path / "before")
    policy.writer.save_hub(tmp_path / "version")
    outgoing, reached = Outgoing(), Event()
    save, write = policy.saving(tmp_path / "beside"), policy.writer.publishing(tmp_path / "out")

    settle = list[Callable[[], None]]()

    def read() -> None:
        reached.wait()
        settle.append(save())
        write()

    def before_change() -> None:
        reached.set()
        outgoing.wait_until_read()

    policy.before_change = before_change
    outgoing.start(read, nothing)
    policy.train_step(UNEQUAL)
    outgoing.finish()
    assert checkpoint.newest(tmp_path / "beside") is None, "no checkpoint has a name before it is synced"
    settle[0]()
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("out", "version")
    )
    assert ours == theirs
    tensors = [policy._tensors(), policy._tensors()]
    for name, found in zip(("before", "beside"), tensors, strict=True):
        path = checkpoint.newest(tmp_path / name)
        assert path
        found.update({key: torch.empty_like(value) for key, value in found.items()})
        checkpoint.read_tensors(path, found, policy._ranks)
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


class Interrupted(PolicyWriter):
    """Computes the log-probabilities of a batch in the middle of its canary, as an update beside it would."""

    seen: torch.Tensor | None = None

    def __init__(self, policy: TrainedPolicy, start: Path) -> None:
        super().__init__(policy.model, policy._adapters, policy._ranks, source=start, dtype=torch.bfloat16)
        self.policy = policy

    def _whole(self, name: str, rows: torch.Tensor, places: slice) -> torch.Tensor:
        if self.seen is None and "layers.1." in name:
            self.seen = torch.empty(0)
            self.seen = self.policy.logprobs(collate(UNEQUAL))
        return super()._whole(name, rows, places)


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "adapters"])
def test_an_update_in_the_middle_of_a_canary_sees_the_weights_in_training_and_their_adapters(
    lora_rank: int, tmp_path: Path
) -> None:
    """The weights in training differ from the published ones, which are rounded and include the adapters."""
    start = make_other_policy(tmp_path / "start", QWEN, dtype=torch.bfloat16)
    policy = TrainedPolicy(start, replace(SETTINGS, lora_rank=lora_rank))
    policy.train_step(UNEQUAL)
    data = collate(UNEQUAL)
    wanted = policy.logprobs(data)
    interrupted = Interrupted(policy, start)
    interrupted.save_hub(tmp_path / "interrupted")
    assert interrupted.seen is not None
    assert torch.equal(interrupted.seen, wanted)
    policy.writer.save_hub(tmp_path / "alone")
    ours, theirs = ((tmp_path / name / canary.FILE_NAME).read_bytes() for name in ("interrupted", "alone"))
    assert ours == theirs
    assert not torch.equal(TrainedPolicy(tmp_path / "alone", SETTINGS).logprobs(data), wanted)


def test_taking_a_version_waits_for_who_reads_the_weights(policy_folder: Path, tmp_path: Path) -> None:
    policy, seen = TrainedPolicy(policy_folder, SETTINGS), list[torch.Tensor]()
    policy.train_step(UNEQUAL)
    policy.writer.save_hub(tmp_path / "version")
    policy.train_step(UNEQUAL)
    weight = next(policy.model.parameters())
    policy.before_change = lambda: seen.append(weight.detach().clone())
    before = weight.detach().clone()
    policy.continue_from(tmp_path / "version")
    assert torch.equal(seen[0], before)


def test_what_is_captured_for_later_holds_no_copy(policy_folder: Path, tmp_path: Path) -> None:
    policy = TrainedPolicy(policy_folder, SETTINGS)
    policy.train_step(UNEQUAL)
    with live_bytes() as count:
        jobs = policy.saving(tmp_path / "checkpoints"), policy.writer.publishing(tmp_path / "version")
    assert count.left < 2**16, "more than the state of the random generator"
    assert count.peak < 2**16, "something was computed before the job"
    for job in jobs:
        job()


def test_what_moves_on_another_thread_sets_no_clock() -> None:
    watchdog = Watchdog(3600.0)
    with watchdog.watching():
        set_at = watchdog._set_again_s
        other = Thread(target=watchdog.moved, args=(7200.0,))
        other.start()
        other.join()
        assert watchdog._set_again_s == set_at
