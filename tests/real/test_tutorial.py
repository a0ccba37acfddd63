"""docs/tutorial.md, typed by a new operator: an empty home, an empty folder, and what the page says.

- Files are the blocks that begin with `# name`; commands are the `sh` blocks; a `text` block is what they print, in
  which `…` stands for anything. Lines may stand between those that are shown.
- `launch` and `join` stay in terminals of their own. Only the round's size and ports and the model's place differ.
- Blocks marked "not run" have the reason, and programs and files that exist.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes.programs import Program, Swarm, free_address, script, until
from tests.tidy.repository import ROOT
from tests.tidy.test_documents import what_is_wrong_with

pytestmark = pytest.mark.processes

TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"^(?P<why>[ ]*<!-- not run: [^\n]+ -->\n)?(?P<margin>[ ]*)```(?P<kind>\w+)\n(?P<body>.*?)^(?P=margin)```$",
    re.DOTALL | re.MULTILINE,
)
STAYS = ("swarm-coordinator launch", "swarm-node join")
TRAINED_S = 480.0
"""The limit of two updates of SmolLM2 on a busy machine."""

QWEN3_4B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""config.json of Qwen/Qwen3-4B, all that `plan` reads of it."""


@dataclass(frozen=True)
class Block:
    """A fenced block of the page."""

    kind: str
    body: str
    is_run: bool


def blocks() -> list[Block]:
    found = BLOCK.finditer(TUTORIAL.read_text())
    return [
        Block(each["kind"], re.sub(rf"^{each['margin']}", "", each["body"], flags=re.MULTILINE), not each["why"])
        for each in found
    ]


def pattern(line: str) -> str:
    return r".*".join(map(re.escape, line.strip().split("…")))


def shows(output: str, expected: str) -> bool:
    """Return True if the expected lines are printed, in this order."""
    printed = iter(output.splitlines())
    return all(any(re.fullmatch(pattern(line), each.strip()) for each in printed) for line in expected.splitlines())


class Desk:
    """A new operator's desk: an empty home, a folder to work in, and one terminal for each program that stays."""

    def __init__(self, swarm: Swarm, folder: Path, model: Path) -> None:
        self._swarm, self.folder = swarm, folder
        home = folder.with_name("home")
        for made in (home, folder):
            made.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        qwen = folder.with_name("qwen")
        qwen.mkdir()
        (qwen / "config.json").write_text(json.dumps(QWEN3_4B))
        path = f"{Path(script('swarm-node')).parent}:/usr/bin:/bin"
        self._begin = [
            "env",
            "-C",
            str(folder),
            f"HOME={home}",
            f"PATH={path}",
            "HF_HUB_OFFLINE=1",
            "LANG=C.UTF-8",
        ]
        self._listen, seeder = free_address(), free_address()
        self._other = (
            ('directory = "round"', f'directory = "round"\nlisten = "{self._listen}"\nseeder = "{seeder}"'),
            ("hf://HuggingFaceTB/SmolLM2-135M-Instruct", str(model)),
            ("max_updates = 30", "max_updates = 2"),
            ("samples_per_group = 8", "samples_per_group = 4"),
            ("groups_per_update = 6", "groups_per_update = 2"),
            ("127.0.0.1:8700", self._listen),
            ("plan examples/qwen3-4b-math.toml", f"plan examples/qwen3-4b-math.toml --set model.path={qwen}"),
        )
        self.stays: list[Program] = []

    def here(self, text: str) -> str:
        """Return a text of the page as it is here."""
        for there, here in self._other:
            text = text.replace(there, here)
        if self.stays and (join := re.search(r"swarm-node join (\S+)$", self.stays[0].output, re.MULTILINE)):
            text = text.replace(f'"http://{self._listen}#…"', join[1])
        return text

    def write(self, body: str) -> None:
        first, _, rest = body.partition("\n")
        (self.folder / first.removeprefix("# ")).write_text(self.here(rest))

    def type(self, commands: str) -> str:
        """Run commands to their end; return what they print."""
        done = self._swarm.start("typed", *self._begin, "sh", "-ec", self.here(commands))
        assert done.process.wait(timeout=TRAINED_S) == 0, done.log + done.output
        return done.output + done.log

    def open_terminal(self, command: str) -> Program:
        name = f"terminal-{len(self.stays) + 1}"
        program = self._swarm.start(name, *self._begin, *shlex.split(self.here(command)))
        self.stays.append(program)
        return program

    def expect(self, commands: str, expected: str) -> None:
        """Run commands until they print what is expected: while a round runs, figures come a moment later."""
        expected = self.here(expected)
        if not self.stays:
            output = self.type(commands)
            assert shows(output, expected), f"{commands} printed:\n{output}"
            return
        until(expected, lambda: shows(self.type(commands), expected), within_s=TRAINED_S)


@pytest.fixture
def desk(swarm: Swarm, smollm2_folder: Path, tmp_path: Path) -> Desk:
    return Desk(swarm, tmp_path / "work", smollm2_folder)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    made = Swarm(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_a_new_operator_types_the_page_from_an_empty_home_to_a_trained_model(desk: Desk) -> None:
    page = [block for block in blocks() if block.is_run]
    for number, block in enumerate(page):
        after = page[number + 1] if number + 1 < len(page) else None
        expected = after.body if after and after.kind == "text" else ""
        if block.body.startswith("# ") and block.kind in ("python", "toml"):
            desk.write(block.body)
        elif block.kind == "sh" and block.body.startswith(STAYS):
            program = desk.open_terminal(block.body)
            for line in desk.here(expected).splitlines():
                program.said(rf"^{pattern(line)}$", within_s=TRAINED_S)
        elif block.kind == "sh":
            desk.expect(block.body, expected)
        elif block.kind == "text" and page[number - 1].kind != "sh":
            desk.stays[-1].said(rf"^{pattern(block.body)}$", within_s=TRAINED_S)
    launched, node = desk.stays
    assert node.process.wait(timeout=60) == 0
    launched.interrupt()
    assert (desk.folder / "policy" / "model.safetensors").exists()
    log = (desk.folder / "round" / "logs" / "learner.log").read_text()
    assert "%|" not in log
    assert max(map(len, log.splitlines())) < 160, "one short line for each update"


def test_what_is_not_run_here_has_a_reason_and_commands_that_exist() -> None:
    problems: list[str] = []
    for block in (block for block in blocks() if block.kind == "sh" and not block.is_run):
        for line in block.body.splitlines():
            if line.startswith(("swarm-", "make ")):
                problems += filter(None, [what_is_wrong_with(line)])
            names = re.findall(r"(?:installers|examples)/[\w./*-]+", line)
            problems += [f"{name} does not exist" for name in names if not list(ROOT.glob(name))]
    assert not problems
