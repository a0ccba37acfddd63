"""Runner of our modules under the interpreter of another environment: `PYTHON -P foreign.py MODULE ARGUMENTS …`.

- That environment sees our packages in `ROOMS`, and no other package of our environment: it keeps its own numpy,
  torch and pydantic.
- This file needs only the standard library; the other environment provides what the module imports.
- A process that the module starts with multiprocessing imports this file first, as `__mp_main__`: it finds the same
  packages, and the kernel kills it when the module's process ends, however that ends.
"""

import ctypes
import importlib
import importlib.util
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
"""Number of the setting in `prctl`."""

ROOMS = ("protocol", "swarm_exact", "swarm_node")


def take_rooms() -> None:
    """Make the packages in `ROOMS` importable, whatever the path is: a loaded package finds its own modules."""
    for room in ROOMS:
        spec = importlib.util.spec_from_file_location(room, ROOT / room / "__init__.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{ROOT / room} is no package")
        sys.modules[room] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[room])


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__mp_main__":
    end_with_parent()
    take_rooms()
if __name__ == "__main__":
    take_rooms()
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])
