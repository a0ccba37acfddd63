"""A rail of the operator's own, in a process that left out libraries which no program of ours uses."""

from pathlib import Path

import pytest

from coordinator.config import PayoutsSection
from coordinator.transactions.rails import open_rail
from protocol.start import leave_out


def test_a_rail_may_import_what_the_program_left_out_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cloud_that_signs.py").write_text("")
    (tmp_path / "rail_that_signs.py").write_text("import cloud_that_signs\nopen_mine = str\n")
    monkeypatch.syspath_prepend(tmp_path)  # where an operator has such a module
    leave_out("cloud_that_signs")
    open_rail(PayoutsSection(rail="rail_that_signs:open_mine"), tmp_path, "")
