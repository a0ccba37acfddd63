"""Payouts on an EVM chain: one transaction opens a batch in the contract `payouts.vy`, payees claim by their proofs.

- The batch's key is its id in the contract, which opens it once. So a transaction may be sent again after anything:
  at most one of them does something, and `send` finds that one by its event.
- Done is what lies below so many blocks. A transaction that the chain's node has forgotten has failed: should it come
  back, it finds the batch open.
- `payouts.json` is what the compiler named in it made of `payouts.vy`; `docs/payouts.md` says how to make it again.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import httpx

from coordinator.config import PayoutsSection
from coordinator.money.rails import Batch, Status
from protocol.errors import ConfigInvalid, PayoutFailed, Unreachable

GAS_PRICE_PERCENT = 125
"""Of what the chain asks at the moment: it may rise until the transaction's block."""

CONTRACT: dict[str, Any] = json.loads(resources.files(__package__).joinpath("payouts.json").read_text())


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
        """One JSON-RPC call; what the chain refuses is told in its own words."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        try:
            reply = self._client.post("", json=request).json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unreachable(f"The chain's node does not answer {method} ({error}).", hint="Try again.") from error
        if "result" not in reply:
            said = reply.get("error", {}).get("message", "nothing")
            raise PayoutFailed(f"The chain's node refuses {method}: {str(said)[:300]}")
        return reply["result"]

    def close(self) -> None:
        self._client.close()

    def transact(self, data: str, to: str | None = None) -> str:
        """Sign and send a transaction; its hash."""
        sender = self._account.address
        target = {"to": to} if to else {}
        gas = int(self.ask("eth_estimateGas", {"from": sender, "data": data, **target}), 16)
        price = int(self.ask("eth_gasPrice"), 16) * GAS_PRICE_PERCENT // 100
        signed = self._account.sign_transaction(
            {
                **target,
                "data": data,
                "gas": gas,
                "maxFeePerGas": price,
                "maxPriorityFeePerGas": min(price, int(self.ask("eth_maxPriorityFeePerGas"), 16)),
                "nonce": int(self.ask("eth_getTransactionCount", sender, "pending"), 16),
                "chainId": int(self.ask("eth_chainId"), 16),
                "value": 0,
            }
        )
        return str(self.ask("eth_sendRawTransaction", "0x" + bytes(signed.raw_transaction).hex()))


class Evm:
    """The rail."""

    def __init__(self, chain: Chain, contract: str, confirmations: int) -> None:
        self._chain = chain
        self._contract = contract
        self._confirmations = confirmations

    def close(self) -> None:
        self._chain.close()

    def send(self, batch: Batch) -> str:
        terms = _words(batch.root, len(batch.payees), batch.amount_micros)
        topics = [CONTRACT["topics"]["Opened"], "0x" + batch.key.hex()]
        query = {"address": self._contract, "fromBlock": "0x0", "toBlock": "latest", "topics": topics}
        for event in self._chain.ask("eth_getLogs", query):
            if event["data"].removeprefix("0x") != terms:
                raise PayoutFailed(f"The contract has opened batch {batch.number} with other payees.")
            return str(event["transactionHash"])
        data = CONTRACT["selectors"]["open"] + _words(batch.key) + terms
        return self._chain.transact(data, self._contract)

    def status(self, reference: str) -> Status:
        receipt = self._chain.ask("eth_getTransactionReceipt", reference)
        if receipt is None:
            known = self._chain.ask("eth_getTransactionByHash", reference)
            return Status.UNDER_WAY if known else Status.FAILED
        if int(receipt["status"], 16) != 1:
            return Status.FAILED
        deep = int(self._chain.ask("eth_blockNumber"), 16) - int(receipt["blockNumber"], 16)
        return Status.DONE if deep >= self._confirmations else Status.UNDER_WAY


def open_evm(settings: PayoutsSection, folder: Path) -> Evm:
    """The rail of the settings."""
    if not (settings.evm_rpc and settings.evm_contract):
        raise ConfigInvalid(
            "Rail evm needs payouts.evm_rpc and payouts.evm_contract.", hint="`payout deploy` makes a contract."
        )
    return Evm(open_chain(settings, folder), settings.evm_contract, settings.evm_confirmations)


def open_chain(settings: PayoutsSection, folder: Path) -> Chain:
    """The chain of the settings; the key's file is for its owner only."""
    path = folder / settings.evm_key
    if not path.exists() or path.stat().st_mode & 0o077:
        raise ConfigInvalid(f"{path} must hold the operator's key and be readable by its owner only (chmod 600).")
    return Chain(settings.evm_rpc, path.read_text().strip())


def deploy(chain: Chain, token: str, unit: int) -> str:
    """Put a contract for this token on the chain; the transaction's hash."""
    return chain.transact(CONTRACT["bytecode"] + _words(bytes.fromhex(token.removeprefix("0x")), unit))


def _words(*values: bytes | int) -> str:
    """Values as a contract takes them: words of 32 bytes, numbers and addresses to the right."""
    return b"".join(value.to_bytes(32) if isinstance(value, int) else value.rjust(32, b"\0") for value in values).hex()
