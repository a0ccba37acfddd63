"""A join string: an address and a root fingerprint."""

import pytest

from protocol.errors import ConfigInvalid
from swarm_node.coordinator_api.join_string import parse


@pytest.mark.parametrize(
    ("fragment", "found"), [("", "nothing"), ("a" * 65, "65 characters"), ("A" * 64, "other characters")]
)
def test_a_fingerprint_of_another_form_is_told_from_one_that_lacks(fragment: str, found: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"This one has {found} there"):
        parse(f"http://host:8700#{fragment}")
