"""Every architecture through every part: each cell of the table in docs/architectures.md is what was found."""

from pathlib import Path

import pytest
import torch

from bench.architectures import DOCUMENT, documented
from protocol.policy import model_config
from tests.architectures import zoo
from tests.architectures.stages import REFUSED, row


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Tiny matrices gain nothing from threads."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_part_works_or_refuses_the_architecture_by_name(name: str, tmp_path: Path) -> None:
    assert documented().get(name) == row(name, tmp_path), f"`make bench-architectures` writes {DOCUMENT} anew"


def test_the_table_has_every_architecture_and_no_other() -> None:
    assert sorted(documented()) == sorted(zoo.ARCHITECTURES)


def test_what_is_refused_at_launch_is_what_the_table_of_reasons_names() -> None:
    refused = {zoo.ARCHITECTURES[name][0] for name, found in documented().items() if found.launch == REFUSED}
    assert refused == {kind for kind, _ in zoo.ARCHITECTURES.values()} & model_config.REFUSED.keys()
