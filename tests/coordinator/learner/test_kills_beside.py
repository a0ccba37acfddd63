"""kill -9 a learner while a version goes out beside its next update: what comes of it is what would have come.

- The loop, its policy and its thread are the real ones. The coordinator is a folder that does what the real one
  promises: the same batch for the same number, a report counts once, a version is there or not.
- A child forks once for each moment. The fork dies for real; another goes on from the disk to the end. Versions,
  reports and commitments must then be those of a round that nobody killed, bit for bit.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

TOP = Path(__file__).parents[3]

ROUND = """
import json, os, resource, signal, sys, threading, traceback
from dataclasses import dataclass
from pathlib import Path
import torch
from blake3 import blake3
from coordinator.config import Config
from coordinator.learner.crew import Crew
from coordinator.learner.loop import Learner
from coordinator.learner.ranks import Ranks
from protocol.errors import OutOfOrder
from protocol.work.learning import LearnerState, TrainingBatch
from tests.coordinator.learner.groups import UNEQUAL

torch.set_num_threads(1)
start, top = Path(sys.argv[1]), Path(sys.argv[2])
LAST, EVERY = 6, 2
BATCHES = [UNEQUAL, UNEQUAL[:2], UNEQUAL[1:]]

class Books:
    '''A coordinator as far as a learner can tell, in a folder.'''

    away_s = 0.0

    def __init__(self, folder, at=lambda what, number: None):
        self.folder, self.at = folder, at
        for name in ("versions", "reports", "commitments"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def state(self):
        versions = sorted(self.folder.glob("versions/?"))
        update = json.loads(versions[-1].read_text())["update"] if versions else 0
        return LearnerState(round_id="a" * 64, newest_version=len(versions), newest_update=update, publish_every=EVERY,
            ledger_size=0, ledger_head=b"", finished=False)

    def batch(self, number, check):
        self.at("batch", number)
        check()
        return TrainingBatch(number=number, groups=BATCHES[number % 3])

    def report(self, report):
        self.at("report", report.number)
        said = {name: value for name, value in report.metrics.items() if not name.endswith("_s")}
        self._once("reports", report.number, said)

    def publish(self, version, update, folder):
        self.at("publish", update)
        digests = {path.name: blake3(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
        self._once("versions", version, {"update": update, "digests": digests})

    def commit(self, commitment):
        self.at("commit", commitment.update)
        said = {"settings": commitment.settings.hex(), **commitment.model_dump(exclude={"settings"})}
        self._once("commitments", commitment.update, said)

    def _once(self, kind, number, said):
        path = self.folder / kind / str(number)
        if path.exists():
            assert json.loads(path.read_text()) == said, f"{kind} {number} came out otherwise the second time"
        beside = path.with_name(f"{number}.new")
        beside.write_text(json.dumps(said))
        beside.replace(path)

    def another(self):
        return self

    progress = finish = close = evaluation_samples = lambda self, *_: None

class Untested(Crew):
    accuracy = lambda self: None  # greedy decoding is not what is killed here

def train(folder, at=lambda what, number: None):
    config = Config.model_validate({"round": {"directory": folder / "round", "max_updates": LAST},
        "model": {"path": str(start)}, "learner": {"algorithm": "echo2", "learning_rate": 0.01, "warmup_updates": 1}})
    Learner(config, Books(folder, at), Untested(config, Ranks())).run()

def forked(run, *words):
    '''What became of a child: 0, its exit code, or minus its signal.'''
    child = os.fork()
    if child == 0:
        os.dup2(os.open(top / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        code = 1
        try:
            run(*words)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def came_to(folder):
    return {str(path.relative_to(folder)): path.read_text() for kind in ("versions", "reports", "commitments")
            for path in sorted((folder / kind).glob("?"))}

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLS = (
    ROUND
    + """
WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")

def at_event(folder, number):
    '''The n-th time that a file of the learner's is opened, renamed or removed, on any thread.'''
    seen = 0
    def hook(name, words):
        nonlocal seen
        if name in WRITES and str(words[0]).startswith(str(folder / "round" / "learner")):
            seen += 1
            if seen == number:
                die()
    sys.addaudithook(hook)
    train(folder)

def while_read(folder, update):
    '''Its checkpoint is half written while the next update's batch is there.'''
    reading, name = threading.Event(), f"{update:09d}.new"
    def hook(event, words):
        if event == "open" and name in str(words[0]) and threading.current_thread().name == "outgoing":
            reading.set()
            threading.Event().wait()  # for ever: the disk has stopped
    sys.addaudithook(hook)
    def at(what, number):
        if (what, number) == ("batch", update + 1):
            reading.wait()
            die()
    train(folder, at)

def while_synced(folder, update):
    '''The disk still syncs its checkpoint when the next update has been made and reported.'''
    syncing, name = threading.Event(), f"{update:09d}.new"
    def hook(event, words):
        if event == "open" and str(words[0]).endswith(name) and threading.current_thread().name == "outgoing":
            syncing.set()
            threading.Event().wait()
    sys.addaudithook(hook)
    def at(what, number):
        if (what, number) == ("batch", update + 2):
            syncing.wait()
            die()
    train(folder, at)

def while_sent(folder, update, what):
    '''Its version is being uploaded when the next update asks for its batch, or is about to be reported.'''
    sending = threading.Event()
    def at(event, number):
        if (event, number) == ("publish", update):
            sending.set()
            threading.Event().wait()
        if (event, number) == (what, update + 1):
            sending.wait()
            die()
    train(folder, at)

def entered(folder, update):
    '''Its version is published, and the learner does not know it yet.'''
    class Entering(Books):
        def publish(self, version, number, place):
            super().publish(version, number, place)
            if number == update:
                die()
    globals()["Books"] = Entering
    train(folder)

straight = top / "straight"
assert forked(train, straight) == 0, "the round that nobody kills"
wanted = came_to(straight)
assert len(wanted) == 2 * LAST + LAST // EVERY + 1, sorted(wanted)

moments = [(at_event, number) for number in range(5, 145, 11)]
moments += [(while_read, update) for update in (2, 4)]
moments += [(while_synced, update) for update in (2, 4)]
moments += [(while_sent, update, what) for update in (2, 4) for what in ("batch", "report")]
moments += [(entered, update) for update in (0, 2, 4, 6)]
for place, (kill, *words) in enumerate(moments):
    folder = top / str(place)
    ended = forked(kill, folder, *words)
    went_on = forked(train, folder)
    print(kill.__name__, *words, ended, went_on, came_to(folder) == wanted, flush=True)
"""
)

FAILURES = (
    ROUND
    + """
import errno

def full_disk(folder):
    '''No more than a few kilobytes fit into one file, from the second version on.'''
    def at(what, number):
        if (what, number) == ("report", 2):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    train(folder, at)

def refused(folder):
    '''The coordinator refuses the second version, and no batch comes after it.'''
    class Refusing(Books):
        def publish(self, version, update, place):
            if update == 2:
                raise OutOfOrder("not this one")
            super().publish(version, update, place)
        def batch(self, number, check):
            while number > 2:  # nodes wait for the version
                check()
            return super().batch(number, check)
    globals()["Books"] = Refusing
    train(folder)

straight = top / "straight"
assert forked(train, straight) == 0
for fail in (full_disk, refused):
    folder = top / fail.__name__
    ended = forked(fail, folder)
    there = sorted(name for name in came_to(folder) if "commitments" not in name)  # these are made beside
    kept = [path.name for path in sorted(folder.glob("round/learner/checkpoints/*"))]
    went_on = forked(train, folder)
    print(fail.__name__, ended, *there, kept, went_on, came_to(folder) == came_to(straight), sep="|", flush=True)
"""
)


def said_by(program: str, start: Path, folder: Path) -> list[str]:
    folder.mkdir()
    command = [sys.executable, "-c", program, str(start), str(folder)]
    ended = subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, (folder / "log").read_text()[-4000:]
    return ended.stdout.splitlines()


@pytest.mark.slow
def test_kill_9_at_any_moment_beside_an_update_costs_nothing(policy_folder: Path, tmp_path: Path) -> None:
    lines = said_by(KILLS, policy_folder, tmp_path / "rounds")
    print(*lines, sep="\n")
    for line in lines:
        *_, ended, went_on, is_same = line.split()
        assert ended == "-9", f"{line}: this moment was never reached"
        assert (went_on, is_same) == ("0", "True"), f"{line}\n{(tmp_path / 'rounds' / 'log').read_text()[-4000:]}"


def test_a_full_disk_and_a_refusal_end_the_learner_and_nothing_is_lost(policy_folder: Path, tmp_path: Path) -> None:
    full, refused = (line.split("|") for line in said_by(FAILURES, policy_folder, tmp_path / "rounds"))
    log = (tmp_path / "rounds" / "log").read_text()
    there = ["1", "reports/1", "reports/2", "versions/1"]
    assert full[1:5] == there, "no update followed a checkpoint that was not written"
    assert "000000002'" not in full[5], "half a checkpoint has no name"
    assert refused[1:5] == there
    assert "not this one" in log
    assert full[6:] == refused[6:] == ["0", "True"], log[-4000:]
