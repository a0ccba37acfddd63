"""A log of somebody else's making: grows a tree of generated leaves, and has each of its checkpoints cosigned.

Runs in the environment of tests/interop/tlog/requirements.txt, as `feed.py WITNESS_KEY LOG_NAME SIZE…`. It prints the
log's key, and waits for a line with the address of a witness that knows it; then it prints a line of JSON for each
size.
"""

import json
import sys

from aics_tlog import Checkpoint, MerkleTree, parse_note, sign_checkpoint, verify_checkpoint, vkey_from_ed25519
from aics_tlog.note import format_vkey
from aics_witness.feeder import FeederError, WitnessClient, merge_cosignatures
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

witness, name, *sizes = sys.argv[1:]
key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
vkey = vkey_from_ed25519(name, key.public_key())
print(format_vkey(vkey), flush=True)
with WitnessClient(sys.stdin.readline().strip(), witness) as client:
    for size in map(int, sizes):
        tree = MerkleTree([b"leaf %d" % number for number in range(abs(size))])
        if size < 0:  # another history of the same size
            tree = MerkleTree([b"other %d" % number for number in range(-size)])
        note = sign_checkpoint(Checkpoint(name, abs(size), tree.root()), key, name).to_bytes()
        try:
            cosigned = merge_cosignatures(note, client.submit(note, tree.consistency_proof))
            found = verify_checkpoint(parse_note(cosigned), vkey, [client.witness_vkey], quorum=1)
            said = {"size": size, "cosigned": found.ok}
        except FeederError as error:
            said = {"size": size, "refused": type(error).__name__, "status": getattr(error, "status", None)}
        print(json.dumps(said), flush=True)
