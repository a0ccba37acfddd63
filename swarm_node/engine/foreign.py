"""Runner of our modules under the interpreter of another environment: `PYTHON -P foreign.py MODULE ARGUMENTS …`.

- That environment sees our packages in `ROOMS`, and no other package of our environment: it keeps its own numpy,
  torch and pydantic.
- This file needs only the standard library; the other environment provides what the module imports.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("protocol", "swarm_exact", "swarm_node")


def take_rooms() -> None:
    """Make the packages in `ROOMS` importable, whatever the path is: a loaded package finds its own modules."""
    for room in ROOMS:
        spec = importlib.util.spec_from_file_location(room, ROOT / room / "__init__.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{ROOT / room} is no package")
        sys.modules[room] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[room])


if __name__ == "__main__":
    take_rooms()
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])
