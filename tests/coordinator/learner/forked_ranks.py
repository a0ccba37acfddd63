"""Ranks as forks of one process that has torch already: each would import it for seconds."""

import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from coordinator.learner.launch import LOOPBACK, STORE


def forked(size: int, work: Callable[..., None], *words: Any) -> list[int]:
    """Do the same work as several ranks; return their exit codes."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
                os.environ |= {STORE: f"{folder}/store", "GLOO_SOCKET_IFNAME": LOOPBACK}
                code = 1
                try:
                    work(*words)
                    code = 0
                except BaseException:  # a fork must end here, whatever happened, and not go on as the parent
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
