"""The price that `join` is given."""

import subprocess

from tests.processes.programs import script


def test_a_price_in_whole_units_is_refused_with_the_number_to_write() -> None:
    run = subprocess.run(
        [script("swarm-node"), "join", "http://127.0.0.1:1#00", "--price", "1.5"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "--price 1500000" in " ".join(run.stderr.split())
