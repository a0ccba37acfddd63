"""The learner's client over real sockets: its reading of answers, and its behaviour without an answer."""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from coordinator.learner.client import CoordinatorClient, read_batch
from protocol import limits
from protocol.errors import (
    ChunkMismatch,
    ConfigInvalid,
    DiskFull,
    ManifestInvalid,
    NotAuthorised,
    OutOfOrder,
    SwarmError,
)
from protocol.work.learning import (
    KnownUploads,
    LearnerProgress,
    LearnerState,
    Publication,
    TrainingBatch,
    TrainingGroup,
    TrainingSample,
    UploadedFile,
)
from protocol.work.rollout import pack_logprobs, pack_tokens
from tests.coordinator.answering import CUT, PROXY, Answer, Asked, answering, error

STATE = LearnerState(
    round_id="a" * 64,
    newest_version=1,
    newest_update=0,
    publish_every=1,
    ledger_size=7,
    ledger_head=b"",
    finished=False,
)


def test_a_batch_of_the_largest_papers_is_read() -> None:
    """512 prompts with 16 samples each, as DAPO has them: more values than any message of a node may have."""
    sample = TrainingSample(tokens=pack_tokens([1, 2]), logprobs=pack_logprobs([-1.0, -2.0]), reward=1.0)
    group = TrainingGroup(claim_id="ab" * 32, prompt=pack_tokens([3]), policy_update=0, samples=(sample,) * 16)
    batch = TrainingBatch(number=1, groups=(group,) * 512, credit_micros=5)
    assert read_batch(batch.to_bytes()) == batch


def test_a_batch_of_long_answers_is_read() -> None:
    """Half a minute of 32 cards: 80 megabytes of tokens and log-probabilities."""
    long = [7] * 10_000
    sample = TrainingSample(tokens=pack_tokens(long), logprobs=pack_logprobs([-1.0] * len(long)), reward=1.0)
    group = TrainingGroup(claim_id="ab" * 32, prompt=pack_tokens([3]), policy_update=0, samples=(sample,) * 16)
    batch = TrainingBatch(number=1, groups=(group,) * 64, credit_micros=5)
    assert read_batch(batch.to_bytes()) == batch


@contextmanager
def asking(*answers: Answer) -> Iterator[tuple[CoordinatorClient, list[Asked]]]:
    """A client of somebody who gives these answers, and what was asked."""
    with answering(*answers) as (url, asked), closing(CoordinatorClient(url, "token")) as client:
        yield client, asked


@pytest.mark.parametrize("away", [CUT, PROXY, Answer(429), error(DiskFull("full")), Answer(500)])
def test_who_cannot_answer_now_is_asked_again_and_told_of_once(away: Answer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.learner.client")
    with asking(away, away, Answer(200, STATE.to_bytes()), Answer(200, STATE.to_bytes())) as (client, asked):
        assert client.state() == client.state() == STATE
    assert len(asked) == 4
    begins, ends = caplog.records
    assert (begins.levelname, ends.levelname) == ("WARNING", "INFO")
    assert begins.getMessage().startswith("waiting for the coordinator: The coordinator ")
    assert "the coordinator answers again after" in ends.getMessage()
    assert 1.0 < client.away_s < 60.0, "two pauses"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (error(NotAuthorised("no")), NotAuthorised),
        (error(OutOfOrder("no")), OutOfOrder),
        (Answer(404, b"<html>Not Found</html>"), ConfigInvalid),
        (Answer(301), ConfigInvalid),
    ],
)
def test_a_refusal_is_raised_at_once(answer: Answer, kind: type[SwarmError]) -> None:
    with asking(answer) as (client, asked), pytest.raises(kind):
        client.state()
    assert len(asked) == 1


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:1"])
def test_an_address_that_is_none_is_not_waited_for(url: str) -> None:
    with pytest.raises(ConfigInvalid, match="http://"):
        CoordinatorClient(url, "token").state()


def test_in_the_middle_of_a_step_nobody_is_waited_for() -> None:
    progress = LearnerProgress(phase="warm start", fraction=0.5, detail="")
    with asking(PROXY, CUT, Answer(204)) as (client, asked):
        for _ in range(3):
            client.mention(progress)
    assert [one.body for one in asked] == [progress.to_bytes()] * 3
    assert client.away_s == 0


def version(folder: Path, size: int) -> bytes:
    """A folder with one file; its bytes."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(data := bytes(range(251)) * (size // 251))
    return data


NOTHING_HELD = Answer(200, KnownUploads(files=()).to_bytes())


def test_a_file_is_uploaded_from_its_beginning_again(tmp_path: Path) -> None:
    data = version(tmp_path / "policy", 3 * limits.MIB)
    cut = Answer(0, taken=limits.MIB + 1000)
    with asking(NOTHING_HELD, cut, Answer(204), Answer(204)) as (client, asked):
        client.publish(1, 0, tmp_path / "policy")
    assert [one.method for one in asked] == ["GET", "PUT", "PUT", "POST"]
    assert asked[1].path == asked[2].path
    assert asked[2].body == data


def test_uploads_that_a_power_cut_took_are_made_again(tmp_path: Path) -> None:
    data = version(tmp_path / "policy", 2510)
    gone = error(ManifestInvalid("model.safetensors was not uploaded."))
    with asking(NOTHING_HELD, Answer(204), gone, NOTHING_HELD, Answer(204), Answer(204)) as (client, asked):
        client.publish(1, 0, tmp_path / "policy")
    assert [one.method for one in asked] == ["GET", "PUT", "POST"] * 2
    assert [one.body for one in asked if one.method == "PUT"] == [data] * 2
    with asking(*[NOTHING_HELD, Answer(204), gone] * 2) as (client, asked), pytest.raises(ManifestInvalid):
        client.publish(1, 0, tmp_path / "policy")


def test_a_file_is_fetched_from_its_beginning_again(tmp_path: Path) -> None:
    data = version(tmp_path / "policy", 2 * limits.MIB)
    digest = blake3(data).hexdigest()
    files = Publication(version=1, update=0, files=(UploadedFile(path="model.safetensors", digest=digest),))
    (taken := tmp_path / "taken").mkdir()
    with asking(Answer(200, files.to_bytes()), Answer(200, data, lost=1), CUT, Answer(200, data)) as (client, _):
        client.fetch(1, taken)
    assert (taken / "model.safetensors").read_bytes() == data
    damaged = asking(Answer(200, files.to_bytes()), Answer(200, data[:-1]))
    with damaged as (client, _), pytest.raises(ChunkMismatch):
        client.fetch(1, taken)
