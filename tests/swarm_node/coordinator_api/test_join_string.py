"""A join string: an address and a root fingerprint."""

import pytest

from protocol.errors import ConfigInvalid, Unreachable
from swarm_node.coordinator_api.join_string import parse
from swarm_node.coordinator_api.short_join import Proof, find_round


@pytest.mark.parametrize(
    ("fragment", "found"), [("", "none."), ("a" * 65, "65 characters there"), ("A" * 64, "other characters there")]
)
def test_a_fingerprint_of_another_form_is_told_from_one_that_lacks(fragment: str, found: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"This one has {found}"):
        parse(f"http://host:8700#{fragment}")


def test_another_scheme_is_named_and_a_long_text_is_marked_as_cut() -> None:
    with pytest.raises(ConfigInvalid, match="begins with http:// or https://, not with ftp://"):
        parse(f"ftp://host:8700#{'a' * 64}")
    with pytest.raises(ConfigInvalid, match=r"^'x+…' is not a join string"):
        parse("x" * 500)


@pytest.mark.parametrize("place", ["host:99999", "host:0", "host:port", "a b:8700", ":8700", "a..b:8700", "-:8700"])
def test_a_host_or_port_that_cannot_be_is_refused_before_anything_is_asked(place: str) -> None:
    with pytest.raises(ConfigInvalid, match="no valid host and port"):
        parse(f"http://{place}#{'a' * 64}")


@pytest.mark.parametrize("place", ["host", "host:1", "[::1]:8700", "203.0.113.7:65535", "swarm-1.example.org:8700/a"])
def test_every_host_and_port_that_can_be_is_accepted(place: str) -> None:
    assert parse(f"http://{place}#{'a' * 64}").url == f"http://{place}"


@pytest.mark.trio
async def test_a_host_that_does_not_answer_is_named_as_it_was_typed() -> None:
    with pytest.raises(Unreachable) as failed:
        await find_round("127.0.0.1:9", Proof())
    assert failed.value.message.startswith("https://127.0.0.1:9 does not answer: connection refused.")
    assert failed.value.message.endswith(" http://127.0.0.1:9 does not answer either.")
    assert "/v1" not in failed.value.message
