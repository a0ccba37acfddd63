"""The local runtime of verifiers as it can run inside the sandbox of a task process.

- verifiers makes one for each episode: a folder, and processes such as the servers of a task's tools. Its own one
  keeps the folder in the home folder, which is read-only here, and makes each process the leader of a new session,
  which the sandbox forbids: nothing may leave the group that ends with the task process.
- Only the processes themselves are ended with an episode. What they started ends with the task process.
- A server of tools writes its port to a file below /tmp; here the file is in the episode's folder.
"""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import runtimes
from verifiers.v1.runtimes.subprocess import SubprocessProcess, SubprocessRuntime

__all__ = ["ConfinedRuntime", "replace_local_runtime"]

PORT_FILE = "MCP_PORT_FILE"
"""The variable with the path to which a server of tools writes its port."""

STOP_S = 5.0
"""The time between asking a process to end and ending it."""


class _ConfinedProcess(SubprocessProcess):  # type: ignore[misc]  # the library is not where types are checked
    """A process that is signalled alone, since its group is ours."""

    async def terminate(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()


class ConfinedRuntime(SubprocessRuntime):  # type: ignore[misc]  # as above
    """The folder and the processes of an episode, inside the sandbox."""

    _background: list[asyncio.subprocess.Process]

    async def start(self) -> None:
        self.workdir = Path(tempfile.mkdtemp(prefix="verifiers-"))
        self.info.id = str(self.workdir)
        self._moved = dict[str, str]()  # the path of a port file, and its place here

    async def run(self, argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
        pipe = asyncio.subprocess.PIPE
        process = await self._started(argv, env, stdout=pipe, stderr=pipe)
        try:
            stdout, stderr = await process.communicate()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
        return vf.ProgramResult(
            exit_code=process.returncode or 0,
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
        )

    async def open_process(self, argv: list[str], env: dict[str, str]) -> _ConfinedProcess:
        pipe = asyncio.subprocess.PIPE
        process = await self._started(argv, env, stdin=pipe, stdout=pipe, stderr=pipe)
        self._background.append(process)
        return _ConfinedProcess(process)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        if asked := env.get(PORT_FILE):
            self._moved[asked] = str(self.workdir / Path(asked).name)
            env = env | {PORT_FILE: self._moved[asked]}
        with (self.workdir / log).open("wb") as file:
            process = await self._started(argv, env, stdout=file, stderr=asyncio.subprocess.STDOUT)
        self._background.append(process)

    async def teardown(self) -> None:
        """End the processes of the background, and wait for them."""
        ended = [process.wait() for process in self._background]
        self._signal("terminate")
        if ended:
            await asyncio.wait(map(asyncio.ensure_future, ended), timeout=STOP_S)
        self._signal("kill")
        self._background = []
        await super().teardown()

    def cleanup(self) -> None:
        self._signal("kill")
        self._background = []
        super().cleanup()

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        read: bytes = await super()._read(self._moved.get(path, path), max_bytes)
        return read

    def _signal(self, how: str) -> None:
        for process in self._background:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    getattr(process, how)()

    async def _started(self, argv: list[str], env: Mapping[str, str], **streams: Any) -> asyncio.subprocess.Process:
        mine = {name: value for name, value in os.environ.items() if "API_KEY" not in name.upper()}
        mine |= self.process_env(dict(env))
        return await asyncio.create_subprocess_exec(*argv, env=mine, cwd=self.workdir, **streams)


def replace_local_runtime() -> None:
    """Have verifiers use this runtime wherever it would use its own local one; its settings name only built-in ones."""
    runtimes.SubprocessRuntime = ConfinedRuntime
