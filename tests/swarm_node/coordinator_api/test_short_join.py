"""The owner's proof of a round is checked for its form before any server is asked."""

import pytest

from protocol.errors import ConfigInvalid
from swarm_node.coordinator_api.short_join import Proof, find_round

NOBODY = "127.0.0.1:9"


@pytest.mark.trio
@pytest.mark.parametrize(
    ("proof", "said"),
    [
        (Proof(phrase="three words only"), "--phrase: a phrase has 6 words, and this one has 3."),
        (Proof(phrase="?!"), "--phrase: a phrase has 6 words, and this one has 0."),
        (Proof(fingerprint="00"), "--fingerprint: a fingerprint has 64 digits"),
        (Proof(fingerprint="g" * 64), "--fingerprint: a fingerprint has 64 digits"),
    ],
)
async def test_a_proof_of_another_form_is_named_as_such(proof: Proof, said: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        await find_round(NOBODY, proof)
    assert refused.value.message.startswith(said)
