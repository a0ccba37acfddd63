"""A real EVM in this process (py-evm), behind the JSON-RPC that nodes of a chain speak; and a token on it."""

import ast
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from eth_account import Account
from eth_tester import EthereumTester, PyEVMBackend
from eth_tester.exceptions import TransactionFailed, TransactionNotFound

sys.setrecursionlimit(1000)
"""As Python has it. Importing py-evm makes it 100,000 for the whole process, in which JSON that nests deeply then ends
the interpreter, where other tests want it refused."""

OPERATOR = Account.from_key("0x" + "00" * 31 + "01")
"""The first account of eth-tester's chain; it is rich."""

TOKEN = (
    "0x346100295760206101195f395f515f336020525f5260405f20556100b861002d6000396100b86000f35b5f80fd5f3560e0"
    "1c63a9059cbb8118610076576044361034176100b4576004358060a01c6100b4576040525f336020525f5260405f20805460"
    "24358082038281116100b457905090508155505f6040516020525f5260405f2080546024358082018281106100b457905090"
    "50815550600160605260206060f35b6370a0823181186100b0576024361034176100b4576004358060a01c6100b457604052"
    "5f6040516020525f5260405f205460605260206060f35b5f5ffd5b5f80fd855820e49a46c0bb3a2a4a323121b28c55aadd8c"
    "f9a266cb4a8ee6f5ee7a6eef75593318b88000a1657679706572830004030034"
)
"""The least that is a token, by vyper 0.4.3: balanceOf, transfer, and all of the supply with whoever makes it.

    balanceOf: public(HashMap[address, uint256])

    @deploy
    def __init__(supply: uint256):
        self.balanceOf[msg.sender] = supply

    @external
    def transfer(to: address, amount: uint256) -> bool:
        self.balanceOf[msg.sender] -= amount
        self.balanceOf[to] += amount
        return True
"""

BALANCE_OF, TRANSFER = "0x70a08231", "0xa9059cbb"
SUPPLY = 10**12


def words(*values: int | str | bytes) -> str:
    """Words of 32 bytes, as contracts take them."""
    numbers = (int.from_bytes(v) if isinstance(v, bytes) else int(v, 16) if isinstance(v, str) else v for v in values)
    return b"".join(number.to_bytes(32) for number in numbers).hex()


class Reverted(Exception):
    """The contract refused."""


class LocalChain:
    """A local test chain."""

    def __init__(self) -> None:
        self.evm = EthereumTester(PyEVMBackend())
        self.lock = threading.Lock()
        self.token = self.deploy(TOKEN + words(SUPPLY))

    def send(self, data: str, to: str | None = None) -> str:
        """A transaction by the operator's wallet, whether or not it does anything; its hash."""
        sent = {"from": OPERATOR.address, "data": data, "gas": 3_000_000, **({"to": to} if to else {})}
        return str(self.evm.send_transaction(sent))

    def transact(self, data: str, to: str | None = None) -> dict[str, Any]:
        """Send a transaction that must succeed; return its receipt."""
        receipt = dict(self.evm.get_transaction_receipt(self.send(data, to)))
        if not receipt["status"]:
            raise Reverted
        return receipt

    def deploy(self, data: str) -> str:
        return str(self.transact(data)["contract_address"])

    def balance(self, account: str) -> int:
        call = {"from": OPERATOR.address, "to": self.token, "data": BALANCE_OF + words(account)}
        return int(self.evm.call(call), 16)

    def answer(self, method: str, params: list[Any]) -> Any:
        """Make a JSON-RPC call."""
        return METHODS[method](self.evm, *params)


def _known(look: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any] | None:
    try:
        return look(name)
    except TransactionNotFound:
        return None


def _receipt(evm: EthereumTester, name: str) -> dict[str, str] | None:
    found = _known(evm.get_transaction_receipt, name)
    if found is None or found["block_number"] is None:
        return None
    return {
        "status": hex(found["status"]),
        "blockNumber": hex(found["block_number"]),
        "contractAddress": found["contract_address"],
    }


def _transaction(evm: EthereumTester, name: str) -> dict[str, str] | None:
    found = _known(evm.get_transaction_by_hash, name)
    return {"hash": name, "nonce": hex(found["nonce"])} if found else None


def _block(name: str) -> str | int:
    return int(name, 16) if name.startswith("0x") else name


def _reason(error: TransactionFailed) -> str:
    """The contract's own words: a selector, two words, and the text."""
    said = ast.literal_eval(str(error))
    return bytes(said[4 + 64 :].rstrip(b"\0")).decode()


def _call(call: dict[str, str]) -> dict[str, Any]:
    return {"gas": 3_000_000, **call}


def _logs(evm: EthereumTester, query: dict[str, Any]) -> list[dict[str, str]]:
    found = evm.get_logs(from_block=0, to_block="latest", address=query["address"], topics=query["topics"])
    return [{"data": log["data"], "transactionHash": log["transaction_hash"]} for log in found]


METHODS: dict[str, Callable[..., Any]] = {
    "eth_chainId": lambda evm: hex(evm.backend.chain.chain_id),
    "eth_blockNumber": lambda evm: hex(evm.get_block_by_number("latest")["number"]),
    "eth_gasPrice": lambda evm: hex(2 * evm.get_block_by_number("pending")["base_fee_per_gas"]),
    "eth_maxPriorityFeePerGas": lambda evm: hex(10**9),
    "eth_getTransactionCount": lambda evm, who, block: hex(evm.get_nonce(who, _block(block))),
    "eth_sendRawTransaction": lambda evm, raw: evm.send_raw_transaction(raw),
    "eth_estimateGas": lambda evm, call: hex(evm.estimate_gas(_call(call))),
    "eth_getTransactionReceipt": _receipt,
    "eth_getTransactionByHash": _transaction,
    "eth_getLogs": _logs,
}


@contextmanager
def served(chain: LocalChain) -> Iterator[str]:
    """The chain's JSON-RPC on loopback; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
            try:
                with chain.lock:
                    reply["result"] = chain.answer(asked["method"], asked["params"])
            except TransactionFailed as error:
                reply["error"] = {"code": 3, "message": f"execution reverted: {_reason(error)}"}
            body = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
