"""Payouts on an EVM chain: one transaction opens a batch in the contract `payouts.vy`, payees claim with their proofs.

- The batch's key is its id in the contract, which opens it once. So a transaction may be sent again at any time: at
  most one of them has an effect, and `send` finds that one by its event.
- A payment is done once `evm_confirmations` blocks lie above it. It has failed once its transaction was reverted at
  that depth, or another transaction used its nonce there. A transaction that the chain's node does not know may be in
  another node's pool and come back, so it is under way until then.
- A reference is the transaction's hash, "/" and its nonce.
- `payouts.json` is the output of the compiler named in it for `payouts.vy`; `docs/recipes.md` says how to build it.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from coordinator.config import PayoutsSection
from coordinator.transactions.rails.base import Status, TransferBatch
from protocol.errors import ConfigInvalid, PayoutFailed, Unreachable

GAS_PRICE_PERCENT = 125
"""The highest gas price offered, in percent of the present one: it may rise until the transaction's block."""

CONTRACT: dict[str, Any] = json.loads(resources.files(__package__).joinpath("payouts.json").read_text())


class Sent(NamedTuple):
    """A transaction that was sent."""

    name: str
    """The transaction's hash."""
    nonce: int
    """The nonce of the operator's account: the chain accepts one transaction with it."""

    @property
    def reference(self) -> str:
        return f"{self.name}/{self.nonce}"


class Chain:
    """A node of the chain, and the operator's account on it."""

    def __init__(self, url: str, key: str) -> None:
        try:
            from eth_account import Account
        except ImportError:
            raise ConfigInvalid("Rail evm needs more packages.", hint="pip install 'echo-swarm[evm]'.") from None
        self._account = Account.from_key(key)
        self._client = httpx.Client(base_url=url, timeout=30)

    def ask(self, method: str, *params: object) -> Any:
        """Make one JSON-RPC call and return its result; an error has the message of the chain's node."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        try:
            reply = self._client.post("", json=request).json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unreachable(f"The chain's node does not answer {method} ({error}).", hint="Try again.") from error
        if "result" not in reply:
            said = reply.get("error", {}).get("message", "no reason given")
            raise PayoutFailed(f"The chain's node refuses {method}: {str(said)[:300]}")
        return reply["result"]

    def close(self) -> None:
        self._client.close()

    def nonces_used(self, block: str) -> int:
        """Return how many nonces the operator's account has used up to a block, or to "pending"."""
        return int(self.ask("eth_getTransactionCount", self._account.address, block), 16)

    def transact(self, data: str, to: str | None = None) -> Sent:
        """Sign and send a transaction."""
        sender = self._account.address
        target = {"to": to} if to else {}
        gas = int(self.ask("eth_estimateGas", {"from": sender, "data": data, **target}), 16)
        nonce = self.nonces_used("pending")
        price = int(self.ask("eth_gasPrice"), 16) * GAS_PRICE_PERCENT // 100
        signed = self._account.sign_transaction(
            {
                **target,
                "data": data,
                "gas": gas,
                "maxFeePerGas": price,
                "maxPriorityFeePerGas": min(price, int(self.ask("eth_maxPriorityFeePerGas"), 16)),
                "nonce": nonce,
                "chainId": int(self.ask("eth_chainId"), 16),
                "value": 0,
            }
        )
        return Sent(str(self.ask("eth_sendRawTransaction", "0x" + bytes(signed.raw_transaction).hex())), nonce)


class Evm:
    """The rail that pays by a contract on an EVM chain."""

    def __init__(self, chain: Chain, contract: str, confirmations: int) -> None:
        self._chain = chain
        self._contract = contract
        self._confirmations = confirmations

    def close(self) -> None:
        self._chain.close()

    def send(self, batch: TransferBatch) -> str:
        terms = _words(batch.root, len(batch.payees), batch.amount_micros)
        topics = [CONTRACT["topics"]["Opened"], "0x" + batch.key.hex()]
        query = {"address": self._contract, "fromBlock": "0x0", "toBlock": "latest", "topics": topics}
        for event in self._chain.ask("eth_getLogs", query):
            if event["data"].removeprefix("0x") != terms:
                raise PayoutFailed(f"The contract has opened batch {batch.number} with other payees.")
            return self._found(str(event["transactionHash"])).reference
        data = CONTRACT["selectors"]["open"] + _words(batch.key) + terms
        return self._chain.transact(data, self._contract).reference

    def status(self, reference: str) -> Status:
        name, _, nonce = reference.partition("/")
        receipt = self._chain.ask("eth_getTransactionReceipt", name)
        if receipt is None:
            return Status.FAILED if self._never_comes(name, nonce) else Status.UNDER_WAY
        if self._height() - int(receipt["blockNumber"], 16) < self._confirmations:
            return Status.UNDER_WAY
        return Status.DONE if int(receipt["status"], 16) == 1 else Status.FAILED

    def _never_comes(self, name: str, nonce: str) -> bool:
        """Return True if a transaction without a receipt will never have one."""
        if not nonce:  # sent before references had one; if it comes back after all, the contract has opened the batch
            return not self._chain.ask("eth_getTransactionByHash", name)
        deep = max(0, self._height() - self._confirmations)
        if self._chain.nonces_used(hex(deep)) <= int(nonce):
            return False
        return self._chain.ask("eth_getTransactionReceipt", name) is None  # it has no receipt since then either

    def _found(self, name: str) -> Sent:
        """Return a transaction that is in a block."""
        known = self._chain.ask("eth_getTransactionByHash", name)
        if known is None:
            raise Unreachable(f"The chain's node does not know transaction {name} any more.", hint="Try again.")
        return Sent(name, int(known["nonce"], 16))

    def _height(self) -> int:
        return int(self._chain.ask("eth_blockNumber"), 16)


def open_evm(settings: PayoutsSection, folder: Path) -> Evm:
    """Return the rail of the settings."""
    if not (settings.evm_rpc and settings.evm_contract):
        raise ConfigInvalid(
            "Rail evm needs payouts.evm_rpc and payouts.evm_contract.", hint="`payout deploy` makes a contract."
        )
    return Evm(open_chain(settings, folder), settings.evm_contract, settings.evm_confirmations)


def open_chain(settings: PayoutsSection, folder: Path) -> Chain:
    """Return the chain of the settings; only the owner may read the key's file."""
    path = folder / settings.evm_key
    if not path.exists() or path.stat().st_mode & 0o077:
        raise ConfigInvalid(f"{path} must hold the operator's key and be readable by its owner only (chmod 600).")
    return Chain(settings.evm_rpc, path.read_text().strip())


def deploy(chain: Chain, token: str, unit: int) -> str:
    """Put a contract for this token on the chain, and return the transaction's hash."""
    return chain.transact(CONTRACT["bytecode"] + _words(bytes.fromhex(token.removeprefix("0x")), unit)).name


def _words(*values: bytes | int) -> str:
    """Encode values for a contract: words of 32 bytes, numbers and addresses to the right."""
    return b"".join(value.to_bytes(32) if isinstance(value, int) else value.rjust(32, b"\0") for value in values).hex()
