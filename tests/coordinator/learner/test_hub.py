"""A policy with its card to a hub that runs here: what arrives, and what a refusal says."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.config import load
from coordinator.learner.hub import write_card
from coordinator.service.round import Round
from coordinator.store.facts import PROGRESS, set_fact
from coordinator.transactions import policy_versions
from protocol.policy.chunks import digest
from protocol.work.learning import Publication, UploadedFile
from tests.coordinator.learner.hub_server import TOKEN, Hub, running

PUSH = "from pathlib import Path; from coordinator.learner.hub import push; import sys; " + (
    "print(push(Path(sys.argv[1]), sys.argv[2], 'a message', private=True))"
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as made:
        yield made


@pytest.fixture
def round_file(policy_folder: Path, tmp_path: Path) -> Path:
    """A round with a published version, at update 0, and a measurement."""
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path}/round"\n[learner]\nalgorithm = "dapo"\n')
    round_ = Round(load(file, []))
    shutil.copytree(policy_folder, round_.publisher.uploads / "1")
    uploads = [UploadedFile(path=path.name, digest=digest(path.read_bytes())) for path in policy_folder.iterdir()]
    made, name = round_.publisher.publish(Publication(version=1, update=0, files=tuple(uploads)))
    round_.database.run_now(policy_versions.record, made, name, now_ms=1)
    (tmp_path / "manifest").write_text(name)
    round_.database.run_now(set_fact, PROGRESS, {"accuracy_before": 0.35, "accuracy_after": 0.72})
    (tmp_path / "id").write_text(round_.round_id)
    round_.close()
    return file


def environment(tmp_path: Path, endpoint: str, token: str) -> dict[str, str]:
    """Return an environment without the token and cache of the user who runs the tests."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    # Without Xet, whose server is no small thing: the older protocol of large files is the hub's, too.
    given |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    return given | ({"HF_TOKEN": token} if token else {})


def push(tmp_path: Path, endpoint: str, token: str, repository: str = "somebody/policy") -> str:
    """The last line of a push that fails."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PUSH, str(folder), repository],
        env=environment(tmp_path, endpoint, token),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().rpartition("\n")[2]


def test_a_card_and_every_file_arrive_in_one_commit(round_file: Path, tmp_path: Path, hub: Hub) -> None:
    program = str(Path(sys.executable).with_name("swarm-coordinator"))
    done = subprocess.run(
        [program, "export", str(round_file), "out", "--version", "1", "--push", "somebody/policy", "--private"],
        env=environment(tmp_path, hub.url, TOKEN),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "out: the policy after 0 updates",
        f"pushed: {hub.url}/somebody/policy/commit/1",
    ]
    assert hub.commits == ["Echo Swarm: the policy after 0 updates"]
    assert [one["name"] for one in hub.created] == ["policy"]
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= set(hub.files)
    card = hub.files["README.md"].decode()
    assert (tmp_path / "id").read_text() in card
    assert "| policy version | 1, byte for byte |" in card


def test_nothing_of_progress_bars_is_printed(round_file: Path, tmp_path: Path, policy_folder: Path) -> None:
    from coordinator.learner.policy import TrainedPolicy
    from coordinator.learner.settings import TrainSettings

    shutil.copytree(policy_folder, tmp_path / "round" / "learner" / "start")
    policy = TrainedPolicy(policy_folder, TrainSettings(learning_rate=1e-2))
    policy.update = 1  # newer than the version
    policy.save(tmp_path / "round" / "learner" / "checkpoints")
    program = str(Path(sys.executable).with_name("swarm-coordinator"))
    done = subprocess.run(
        [program, "export", str(round_file), "out"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "out: the policy after 1 update\n")
    assert [line.split()[1:3] for line in done.stderr.splitlines()] == [["INFO", "Reading"], ["INFO", "Writing"]]


class TestCard:
    @pytest.fixture
    def folder(self, policy_folder: Path, tmp_path: Path) -> Path:
        return shutil.copytree(policy_folder, tmp_path / "out")

    def card(self, round_file: Path, folder: Path, update: int = 0) -> str:
        write_card(load(round_file, []), folder, update)
        return (folder / "README.md").read_text()

    def test_it_has_the_evidence_of_the_round(self, round_file: Path, folder: Path) -> None:
        card = self.card(round_file, folder)
        assert f"| its manifest | `{(round_file.parent / 'manifest').read_text()}` (BLAKE3) |" in card
        assert "The learner's own measurement: 35.0% right before the first update, 72.0% at the end." in card
        assert "| algorithm | dapo |" in card
        assert "| correction.sequence_low |" in card
        assert card.startswith("---\nlibrary_name: transformers\n")

    def test_weights_that_are_not_those_of_the_version_are_not_called_so(self, round_file: Path, folder: Path) -> None:
        weights = bytearray((folder / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (folder / "model.safetensors").write_bytes(weights)
        card = self.card(round_file, folder)
        assert "byte for byte" not in card
        assert "in other files than the published ones" in card
        assert "BLAKE3" not in card

    def test_an_update_that_was_never_published_says_so(self, round_file: Path, folder: Path) -> None:
        assert "none was published at this update" in self.card(round_file, folder, update=7)


class TestRefusals:
    @pytest.mark.parametrize("token", ["", "hf_read"])
    def test_a_token_that_may_not_write_is_named(self, tmp_path: Path, hub: Hub, token: str) -> None:
        said = push(tmp_path, hub.url, token)
        assert "This token has no write access to somebody/policy on the hub. Run `hf auth login`" in said
        assert f"try again with `hf upload somebody/policy {tmp_path}/small`" in said
        assert hub.files == {}

    def test_a_hub_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with socket.socket() as held:  # bound and not listening: who dials it is refused
            held.bind(("127.0.0.1", 0))
            said = push(tmp_path, f"http://127.0.0.1:{held.getsockname()[1]}", TOKEN)
        assert "The hub could not be reached:" in said
        assert "The folder is complete" in said

    def test_a_repository_that_the_hub_does_not_know_is_named(self, tmp_path: Path, hub: Hub) -> None:
        assert "The hub refused the upload:" in push(tmp_path, hub.url, TOKEN, "other/policy")

    def test_a_name_that_is_none_is_refused(self, tmp_path: Path, hub: Hub) -> None:
        assert "is not a repository name" in push(tmp_path, hub.url, TOKEN, "a//b")
        assert json.dumps(hub.created) == "[]"
