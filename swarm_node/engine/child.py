"""The engine child: reads commands from stdin, answers on stdout, and dies with its parent.

- Nothing but frames may reach stdout: file descriptor 1 is pointed at stderr before any library is imported.
- A failed command becomes a `Failed` frame with a code; a traceback goes to stderr at most.
- When stdin ends, the process exits at once, even in mid-generation: nobody is left to answer.
"""

import argparse
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from protocol import limits
from protocol.errors import EngineFailed, MalformedMessage, SwarmError
from swarm_node.engine.messages import (
    LENGTH_BYTES,
    Answer,
    Command,
    Failed,
    Finished,
    Generate,
    GroupDone,
    Load,
    Loaded,
    Measure,
    Measured,
    Ready,
    frame,
)

if TYPE_CHECKING:
    from swarm_node.engine.torch_engine import TorchEngine

COMMANDS_WAITING_MAX = 2
"""The agent sends one command at a time; a second slot holds the next while the first is answered."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run the child until stdin ends."""
    parser = argparse.ArgumentParser(prog="swarm-node engine", description="Internal: the sampling engine's process.")
    parser.add_argument("--threads", type=int, default=1, help="threads of one matrix product")
    options = parser.parse_args(arguments)
    answers = claim_stdout()
    commands: queue.Queue[bytes] = queue.Queue(COMMANDS_WAITING_MAX)
    threading.Thread(target=_read_until_end, args=(sys.stdin.buffer, commands), daemon=True).start()
    engine = _start_engine(options.threads)

    def answer(body: Ready | Loaded | GroupDone | Finished | Measured | Failed) -> None:
        answers.write(frame(Answer(body=body)))
        answers.flush()

    answer(Ready())
    while True:
        try:
            _obey(engine, Command.from_bytes(commands.get()), answer)
        except BrokenPipeError:
            return 0
        except SwarmError as error:
            answer(Failed(code=error.code, message=error.message, hint=error.hint))
        except Exception as error:  # the agent must hear of any failure, and the next command may still succeed
            log.exception("command failed")
            answer(Failed(code=EngineFailed.code, message=f"{type(error).__name__}: {error}"[:1000], hint=""))


def _obey(
    engine: "TorchEngine", command: Command, answer: Callable[[Loaded | GroupDone | Finished | Measured], None]
) -> None:
    match command.body:
        case Load(folder=folder):
            answer(engine.load(Path(folder)))
        case Generate(requests=requests):
            engine.generate(requests, answer)
            answer(Finished())
        case Measure(rows=rows, new_tokens=new_tokens):
            answer(engine.measure(rows, new_tokens))


def claim_stdout() -> BinaryIO:
    """Keep the pipe for frames; whatever prints to standard output from now on lands in the log."""
    sys.stdout.flush()
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def _start_engine(threads: int) -> "TorchEngine":
    """Import torch only now: it takes seconds, and stdin is already being watched."""
    import torch
    from transformers.utils import logging as transformers_logging

    from swarm_node.engine.torch_engine import TorchEngine

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    return TorchEngine()


def _read_until_end(pipe: BinaryIO, commands: "queue.Queue[bytes]") -> None:
    """Hand over every frame; at the end of the input, or at one that is no frame, end the process."""
    try:
        while header := pipe.read(LENGTH_BYTES):
            size_bytes = int.from_bytes(header)
            if size_bytes > limits.MESSAGE_MAX_BYTES:
                raise MalformedMessage(f"A frame of {size_bytes} bytes.")
            body = pipe.read(size_bytes)
            if len(body) < size_bytes:
                break
            commands.put(body)
    finally:
        os._exit(0)  # the main thread may be deep in a matrix product
