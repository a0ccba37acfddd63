"""Objects from which several tests of the protocol start."""

import pytest

from tests.protocol.tuf_repository import Seen, two_versions


@pytest.fixture
def seen() -> Seen:
    """A repository with two versions, and a node that has seen both."""
    return two_versions()
