"""Runs a module of ours under an interpreter of another environment: `PYTHON -P foreign.py MODULE ARGUMENTS …`.

- That environment sees our rooms `protocol` and `swarm_node` and nothing else of what is installed beside them: its own
  numpy, torch and pydantic stay the only ones.
- Only the standard library is needed here; what the module imports is the other environment's business.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("protocol", "swarm_node")


def take_rooms() -> None:
    """Make the rooms importable, wherever the path leads: a package finds its modules by itself once it is there."""
    for room in ROOMS:
        spec = importlib.util.spec_from_file_location(room, ROOT / room / "__init__.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{ROOT / room} is no package")
        sys.modules[room] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[room])


if __name__ == "__main__":
    take_rooms()
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])
