"""The operator's manual lists every setting with its real default and meaning."""

import re
from pathlib import Path

from coordinator.config import Config

MANUAL = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def test_the_documented_settings_are_the_real_ones() -> None:
    documented = re.findall(r"^\| `(\w+\.\w+)` \| `(.*)` \| (.*) \|$", MANUAL, re.MULTILINE)
    real = [
        (f"{section}.{key}", str(field.default), field.description)
        for section, table in Config.model_fields.items()
        for key, field in type(table.default).model_fields.items()
    ]
    assert documented == real
