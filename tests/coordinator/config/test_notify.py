"""Settings of messages to the operator: what would fail at each message is refused at once."""

import pytest

from coordinator.config import parse
from protocol.errors import ConfigInvalid

MAIL = {"mail_from": "swarm@example.org", "smtp": "smtp.example.org:587"}


@pytest.mark.parametrize("wrong", ["", "anna", "anna@", "anna@example.org\nBcc: all@example.org", "a@b, c@d"])
def test_a_receiver_that_is_no_mail_address_is_refused(wrong: str) -> None:
    parse({"notify": MAIL | {"mail_to": ["anna@example.org"]}})
    with pytest.raises(ConfigInvalid, match="mail_to"):
        parse({"notify": MAIL | {"mail_to": [wrong]}})
