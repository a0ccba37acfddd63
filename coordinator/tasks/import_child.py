"""The process that makes a round's copy of its problems; only it runs the operator's generators and readers."""

import json
import subprocess
import sys
from pathlib import Path

from coordinator.config import Config
from coordinator.tasks.importing import check_copy, make_copy, needs_data
from coordinator.tasks.kinds import FOLDER, NOTE, require_granted, require_known, require_use
from protocol.errors import ERRORS, ConfigInvalid, SwarmError

TIMEOUT_S = 24 * 3600.0
"""The time limit, enough for the largest downloads; the operator sees the progress and may stop it."""


def prepare(config: Config, *, anew: bool) -> str:
    """Return the digest of a round's copy of its problems, which a separate process makes now, or which is checked."""
    require_known(config.task.name)
    require_granted(config)
    require_use(config)
    if not needs_data(config):
        return ""
    folder = config.round.directory / FOLDER
    if not anew and (folder / NOTE).exists():
        return str(check_copy(folder)["digest"])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coordinator.tasks.import_child", str(folder)],
        input=config.model_dump_json(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise _failure(done.stdout)
    return str(check_copy(folder)["digest"])


def _failure(output: str) -> SwarmError:
    try:
        value = json.loads(output.rpartition("\n")[2] or output)
        return ERRORS[value["code"]](value["message"], hint=value["hint"])
    except (ValueError, KeyError, TypeError):
        return ConfigInvalid("The problems could not be read. The error is printed above.")


def main() -> int:
    sys.stdout.flush()
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        make_copy(Config.model_validate_json(sys.stdin.read()), Path(sys.argv[1]))
    except SwarmError as error:
        answers.write(json.dumps(error.to_wire()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
