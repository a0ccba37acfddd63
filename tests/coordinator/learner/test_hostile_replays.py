"""Files for a replay that try to harm whoever replays them, or to escape a verdict."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

from coordinator.commands.audit import MISMATCH, app
from coordinator.config import Config
from coordinator.learner import replaying
from coordinator.learner.commitments import document, folder_digests, settings_document
from coordinator.learner.ranks import Ranks, machine_here
from coordinator.model.watchdog import Watchdog
from protocol.policy import chunks
from swarm_node.ledger import learner_audit
from tests.coordinator.learner.test_learner_cheats import CHEATED, PlayedRound

NO_VERDICT = 3

Values = dict[str, Any]


class FetchedUpdate:
    """A folder that an auditor fetched from an honest round, to be altered by a stranger who knows the log."""

    def __init__(self, folder: Path, start: Path) -> None:
        self.folder = folder / "audited"
        played = PlayedRound(folder, start).play()
        trio.run(learner_audit.fetch, played.log, played.read(), CHEATED, self.folder, print)

    def commit(self, change: Callable[[Values], Any], **entry: Any) -> None:
        """Have the log say that the settings were others, and the first entry too."""
        settings = json.loads((self.folder / "settings.json").read_bytes())
        settings["start"] = folder_digests(self.folder / "start")
        data = document(change(settings) or settings)
        (self.folder / "settings.json").write_bytes(data)
        file = self.folder / "updates.json"
        described = json.loads(file.read_bytes())
        for each in described["updates"]:
            each["settings_digest"] = chunks.digest(data)
        described["updates"][0] |= entry
        file.write_text(json.dumps(described))

    def replay(self) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["update", str(self.folder)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output


@pytest.fixture
def fetched(tmp_path: Path, policy_folder: Path) -> FetchedUpdate:
    return FetchedUpdate(tmp_path, policy_folder)


def nothing(_: Values) -> None:
    """Keep the settings."""


@pytest.mark.parametrize("name", ["checkpoint/.metadata", "checkpoint/beside", "checkpoint/__0_0.distcp", "batches/1"])
def test_files_that_no_learner_can_have_used_do_not_match(name: str, fetched: FetchedUpdate) -> None:
    (fetched.folder / name).write_bytes(b"\x1b[2J no such file")
    code, said = fetched.replay()
    assert (code, "DOES NOT MATCH" in said, "\x1b" in said) == (MISMATCH, True, False)


@pytest.mark.parametrize("name", ["modeling_stranger.py", "pytorch_model.bin", "adapter_config.json"])
def test_a_start_with_files_that_could_run_or_name_code_is_not_loaded(name: str, fetched: FetchedUpdate) -> None:
    (fetched.folder / "start" / name).write_text("{}")
    fetched.commit(nothing)
    code, said = fetched.replay()
    assert (code, f"has a file {name}" in said) == (NO_VERDICT, True)


@pytest.mark.parametrize("place", ["attn_implementation", "experts_implementation"])
def test_a_start_whose_configuration_names_a_kernel_to_download_is_not_loaded(
    place: str, fetched: FetchedUpdate
) -> None:
    file = fetched.folder / "start" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {place: "stranger/kernel"}))
    fetched.commit(nothing)
    code, said = fetched.replay()
    assert (code, "names code to run" in said) == (NO_VERDICT, True)


def test_a_machine_whose_name_steers_a_terminal_is_printed_without_it(fetched: FetchedUpdate) -> None:
    fetched.commit(lambda settings: settings.update(machine="\x1b[2Jgone"), after="0" * 64)
    code, said = fetched.replay()
    assert (code, "\\x1b[2Jgone" in said, "\x1b" in said) == (NO_VERDICT, True, False)


def test_a_card_that_is_not_here_is_no_verdict(fetched: FetchedUpdate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # whatever this machine has
    fetched.commit(lambda settings: settings["settings"].update(device="cuda"))
    code, said = fetched.replay()
    assert (code, "has no such card" in said) == (NO_VERDICT, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"processes": 65}, "at most 64 replay"),
        ({"processes": 0}, "at most 64 replay"),
        ({"processes": 5}, "and this machine has 4 cores"),
        ({"processes": 4, "threads": 17}, "with 68 threads; on 4 cores, at most 64 replay"),
        ({"threads": 65}, "with 65 threads"),
        ({"threads": 0}, "with 0 threads"),
    ],
)
def test_more_ranks_and_threads_than_a_machine_can_have_are_not_started(
    change: Values, reason: str, fetched: FetchedUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)  # whatever this machine has
    fetched.commit(lambda settings: settings.update(change))
    with pytest.raises(replaying.NoVerdict, match=reason):
        replaying.processes_of(fetched.folder)


def test_a_machine_without_memory_gives_no_verdict(fetched: FetchedUpdate, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    # A real lack of memory would end other tests on this machine, too.
    monkeypatch.setattr("coordinator.learner.policy.TrainedPolicy.train_step", fail)
    code, said = fetched.replay()
    assert (code, "can't allocate memory" in said) == (NO_VERDICT, True)


def test_fewer_ranks_than_the_learner_had_give_no_verdict(fetched: FetchedUpdate) -> None:
    fetched.commit(lambda settings: settings.update(processes=2))
    with pytest.raises(replaying.NoVerdict, match="2 processes trained together, and 1 replay"):
        list(replaying.replay(fetched.folder, print))


@pytest.mark.parametrize(("processes", "seconds"), [(1, 0.0), (2, replaying.HUNG_S)])
def test_a_rank_that_waits_for_one_that_hangs_ends(
    processes: int, seconds: float, fetched: FetchedUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    class Watched(Ranks):
        def __init__(self, device: str, watchdog: Watchdog) -> None:
            limits.append(watchdog._seconds)
            super().__init__(device, watchdog)

    monkeypatch.setattr(replaying, "Ranks", Watched)  # the real class, which tells its limit
    fetched.commit(lambda settings: settings.update(processes=processes))
    with suppress(replaying.NoVerdict):  # one process here is not two
        next(replaying.replay(fetched.folder, print))
    assert limits == [seconds]


def test_a_difference_of_unlike_machines_blames_nobody(fetched: FetchedUpdate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner of several ranks names the machine of each, and an auditor compares each of its cards."""
    config = Config.model_validate({"round": {"directory": fetched.folder}})
    ours = machine_here("cpu")
    assert replaying.differences(fetched.folder) == []
    for other in (ours._replace(name="another"), ours._replace(software=ours.software | {"torch": "1.0"})):
        data = settings_document(config, fetched.folder / "start", [ours, other])
        (fetched.folder / "settings.json").write_bytes(data)
        assert len(replaying.differences(fetched.folder)) == 1
    (fetched.folder / "settings.json").write_bytes(settings_document(config, fetched.folder / "start", [ours, ours]))
    assert replaying.differences(fetched.folder) == []

    # This machine has no card, and the test needs two unlike ones.
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: {"cuda:1": "small"}.get(device, "large"))
    described = {"processes": 2, "settings": {"device": "cuda"}, "machine": "large", "software": ours.software}
    (fetched.folder / "settings.json").write_text(json.dumps(described))
    assert replaying.differences(fetched.folder) == ["machine is large; small here and large there"]
    described |= {"processes": 3, "machine": "large; small"}
    (fetched.folder / "settings.json").write_text(json.dumps(described))
    assert replaying.differences(fetched.folder) == [
        "the order in which 3 cards add may depend on how they are connected"
    ]
    described |= {"processes": 2}
    (fetched.folder / "settings.json").write_text(json.dumps(described))
    monkeypatch.setattr("torch.version.hip", "7.2")  # a card of AMD, which this machine lacks, too
    assert replaying.differences(fetched.folder) == ["this card adds some numbers of this model in no fixed order"]


def test_a_shell_that_says_it_is_a_rank_changes_no_verdict(
    fetched: FetchedUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells of torchrun and of PyTorchJob set these; a rank without a launcher would end as if it had succeeded."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, said = fetched.replay()
    assert (code, "to the bit" in said) == (0, True)


@pytest.mark.parametrize("settings", [[], {"settings": {}}, {"settings": {"device": 7}}])
def test_settings_that_are_none_do_not_match(settings: Any, fetched: FetchedUpdate) -> None:
    fetched.commit(lambda _: settings or [0])
    code, said = fetched.replay()
    assert (code, "not those of a learner" in said) == (MISMATCH, True)


def test_a_version_that_the_operator_put_in_the_place_of_the_checkpoint_is_no_lie(fetched: FetchedUpdate) -> None:
    """The checkpoint of that update was there already, and stays as it was."""
    fetched.commit(nothing, before="1" * 64, replaced_by=1)
    code, said = fetched.replay()
    assert (code, "put version 1 in the place of the state" in said) == (NO_VERDICT, True)
