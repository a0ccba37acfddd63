"""Rail evm against a real EVM: batches are opened once whatever is repeated, and payees claim what the tree says."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.config import PayoutsSection
from coordinator.transactions.rails import open_rail, scheme
from coordinator.transactions.rails.base import Status, TransferBatch
from coordinator.transactions.rails.evm import CONTRACT, Evm, deploy, open_chain
from ledger import payees
from ledger.payees import Payee
from protocol.errors import ConfigInvalid, PayoutFailed, Unreachable
from protocol.people.payout_addresses import checked_address, checksummed
from tests.coordinator.chain import OPERATOR, SUPPLY, TRANSFER, LocalChain, Reverted, served, words

ROUND = "a" * 64
CONFIRMATIONS = 2


def payee(number: int, micros: int) -> Payee:
    account = checksummed("0x" + f"{number:040x}".replace("0", "a", 20))
    return Payee(f"owner {number}", checked_address(f"evm:{account}"), micros)


def batch(number: int = 1, size: int = 3, micros: int = 100) -> TransferBatch:
    return TransferBatch(ROUND, number, tuple(payee(place, micros + place) for place in range(1, 1 + size)))


class Stage:
    """A chain, the contract on it, and the operator's settings."""

    def __init__(self, chain: LocalChain, url: str, folder: Path) -> None:
        self.chain = chain
        self.folder = folder
        key = folder / "evm.key"
        key.write_text(bytes(OPERATOR.key).hex())
        key.chmod(0o600)
        self.settings = PayoutsSection(rail="evm", evm_rpc=url, evm_confirmations=CONFIRMATIONS)
        with closing(open_chain(self.settings, folder)) as operator:
            made = chain.answer("eth_getTransactionReceipt", [deploy(operator, chain.token, 1)])
        self.contract: str = made["contractAddress"]
        self.settings = self.settings.model_copy(update={"evm_contract": self.contract})

    def rail(self) -> Evm:
        made = open_rail(self.settings, self.folder, "")
        assert isinstance(made, Evm)
        return made

    def fund(self, micros: int) -> None:
        self.chain.transact(TRANSFER + words(self.contract, micros), self.chain.token)

    def call(self, function: str, *values: int | str | bytes) -> None:
        self.chain.transact(CONTRACT["selectors"][function] + words(*values), self.contract)

    def claim(self, of: TransferBatch, place: int, *, who: Payee | None = None, index: int | None = None) -> None:
        """Claim as anybody may: the money goes to the payee."""
        who = who or of.payees[place]
        proof = payees.proofs(of.payees)[place]
        index = place if index is None else index
        self.call("claim", of.key, index, who.address[4:], who.amount_micros, 160, len(proof), *proof)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    chain = LocalChain()
    with served(chain) as url:
        yield Stage(chain, url, tmp_path)


def test_a_batch_is_opened_confirmed_and_claimed_to_the_last_micro(stage: Stage) -> None:
    made = batch()
    stage.fund(made.amount_micros)
    with closing(stage.rail()) as rail:
        reference = rail.send(made)
        assert rail.status(reference) is Status.UNDER_WAY
        stage.chain.evm.mine_blocks(CONFIRMATIONS)
        assert rail.status(reference) is Status.DONE
    for place, who in enumerate(made.payees):
        stage.claim(made, place)
        assert stage.chain.balance(who.address[4:]) == who.amount_micros
    assert stage.chain.balance(stage.contract) == 0


def test_batch_sent_again_after_a_crash_is_found_and_not_opened_twice(stage: Stage) -> None:
    made = batch()
    stage.fund(3 * made.amount_micros)
    with closing(stage.rail()) as rail:
        reference = rail.send(made)  # and the reference was lost
    with closing(stage.rail()) as rail:
        assert rail.send(made) == reference


def test_second_transaction_for_a_batch_fails_for_certain_and_sending_again_finds_the_first(stage: Stage) -> None:
    """The first transaction was not in a block yet: its event could not be found."""
    made = batch()
    stage.fund(3 * made.amount_micros)
    with closing(stage.rail()) as rail:
        first = rail.send(made)
        terms = words(made.key, made.root, len(made.payees), made.amount_micros)
        second = stage.chain.send(CONTRACT["selectors"]["open"] + terms, stage.contract)
        stage.chain.evm.mine_blocks(CONFIRMATIONS)
        assert (rail.status(first), rail.status(second)) == (Status.DONE, Status.FAILED)
        assert rail.send(made) == first


def test_transaction_that_the_chain_has_forgotten_is_under_way_until_another_has_its_nonce(stage: Stage) -> None:
    """A block was reverted, or a pool dropped a transaction with a low fee: other nodes may still have it."""
    made, evm = batch(), stage.chain.evm
    stage.fund(3 * made.amount_micros)
    with closing(stage.rail()) as rail:
        before = evm.take_snapshot()
        reference = rail.send(made)
        evm.revert_to_snapshot(before)
        evm.mine_blocks(2 * CONFIRMATIONS)
        assert rail.status(reference) is Status.UNDER_WAY, "nothing has its nonce"
        stage.fund(1)
        assert rail.status(reference) is Status.UNDER_WAY, "that block could be taken back, too"
        evm.mine_blocks(CONFIRMATIONS)
        assert rail.status(reference) is Status.FAILED
        again = rail.send(made)
        evm.mine_blocks(CONFIRMATIONS)
        assert again != reference
        assert rail.status(again) is Status.DONE


def test_transaction_that_comes_back_after_it_was_forgotten_is_done(stage: Stage) -> None:
    made, evm = batch(), stage.chain.evm
    stage.fund(3 * made.amount_micros)
    with closing(stage.rail()) as rail:
        before = evm.take_snapshot()
        reference = rail.send(made)
        after = evm.take_snapshot()
        evm.revert_to_snapshot(before)
        assert rail.status(reference) is Status.UNDER_WAY
        evm.revert_to_snapshot(after)
        evm.mine_blocks(CONFIRMATIONS)
        assert rail.status(reference) is Status.DONE
        assert rail.send(made) == reference


def test_what_fails_in_a_block_has_failed_when_that_cannot_be_taken_back(stage: Stage) -> None:
    made = batch()
    stage.fund(made.amount_micros)
    with closing(stage.rail()) as rail:
        rail.send(made)
        terms = words(made.key, made.root, len(made.payees), made.amount_micros)
        second = stage.chain.send(CONTRACT["selectors"]["open"] + terms, stage.contract)
        assert rail.status(second) is Status.UNDER_WAY
        stage.chain.evm.mine_blocks(CONFIRMATIONS)
        assert rail.status(second) is Status.FAILED


def test_reference_from_before_they_had_nonces_has_failed_where_nothing_is_known_of_it(stage: Stage) -> None:
    with closing(stage.rail()) as rail:
        assert rail.status("0x" + "12" * 32) is Status.FAILED


def test_batch_that_is_not_covered_is_refused_and_can_be_sent_later(stage: Stage) -> None:
    made, other = batch(1), batch(2)
    stage.fund(made.amount_micros + other.amount_micros - 1)
    with closing(stage.rail()) as rail:
        rail.send(made)
        with pytest.raises(PayoutFailed, match="move tokens here"):
            rail.send(other)
        stage.fund(1)
        rail.send(other)


def test_same_batch_number_with_other_payees_is_never_paid(stage: Stage) -> None:
    """A store that was restored from an old backup, say."""
    stage.fund(10_000)
    with closing(stage.rail()) as rail:
        rail.send(batch())
        with pytest.raises(PayoutFailed, match="other payees"):
            rail.send(batch(micros=200))


def test_contract_takes_every_proof_of_our_trees(stage: Stage) -> None:
    """A root that is a leaf, a full tree, ragged ones."""
    for number, size in enumerate((1, 2, 5, 8), 1):
        made = batch(number, size=size)
        stage.fund(made.amount_micros)
        with closing(stage.rail()) as rail:
            rail.send(made)
        for place in range(size):
            stage.claim(made, place)
        assert stage.chain.balance(stage.contract) == 0


def test_thief_at_the_contract_gets_nothing(stage: Stage) -> None:
    made = batch()
    stage.fund(10 * made.amount_micros)
    thief = payee(9, made.payees[0].amount_micros)
    with closing(stage.rail()) as rail:
        with pytest.raises(Reverted):
            stage.claim(made, 0)  # not open yet
        rail.send(made)
    with pytest.raises(Reverted):
        stage.claim(made, 0, who=thief)
    with pytest.raises(Reverted):
        stage.claim(made, 0, who=made.payees[0]._replace(amount_micros=made.amount_micros))
    with pytest.raises(Reverted):
        stage.claim(made, 0, index=1)
    with pytest.raises(Reverted):
        stage.claim(made, 0, index=2**255)
    stage.claim(made, 0)
    with pytest.raises(Reverted):
        stage.claim(made, 0)
    assert stage.chain.balance(thief.address[4:]) == 0
    assert stage.chain.balance(made.payees[0].address[4:]) == made.payees[0].amount_micros


def test_operator_takes_back_only_what_no_batch_owes(stage: Stage) -> None:
    made = batch()
    stage.fund(made.amount_micros + 50)
    with closing(stage.rail()) as rail:
        rail.send(made)
    with pytest.raises(Reverted):
        stage.call("withdraw", 51)
    stage.call("withdraw", 50)
    assert stage.chain.balance(OPERATOR.address) == SUPPLY - made.amount_micros


def test_settings_that_cannot_pay_are_refused_before_anything_is_sent(stage: Stage, tmp_path: Path) -> None:
    without = stage.settings.model_copy(update={"evm_contract": ""})
    with pytest.raises(ConfigInvalid, match="evm_contract"):
        open_rail(without, tmp_path, "")
    with pytest.raises(ConfigInvalid, match="reference"):
        open_rail(stage.settings, tmp_path, "by-hand")
    (tmp_path / "evm.key").chmod(0o640)
    with pytest.raises(ConfigInvalid, match="chmod 600"):
        open_rail(stage.settings, tmp_path, "")
    assert (scheme(stage.settings), scheme(PayoutsSection())) == ("evm:", "")


def test_a_chain_that_does_not_answer_is_named(stage: Stage) -> None:
    nowhere = stage.settings.model_copy(update={"evm_rpc": "http://127.0.0.1:1"})
    with closing(open_chain(nowhere, stage.folder)) as chain, pytest.raises(Unreachable):
        chain.ask("eth_chainId")
