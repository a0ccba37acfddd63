// Checks a receipt of the ledger as docs/ledger.md specifies:
//
// (1) the first root document hashes to the round id; each later one is signed by the previous one's keys and its own;
// (2) the checkpoint is signed by a ledger key that one of these roots names;
// (3) each entry, hashed with its proof, gives the checkpoint's root;
// (4) the entries are the credit of the requested claim, its settlement if there is one, and, after a void one, its
//     reinstatement if there is one.

import { decode } from "./msgpack.js";
import { HASH_BYTES, concat, demand, equal, ledgerRoots, openCheckpoint, sha256 } from "./signed.js";

const PROOF_MAX = 64;

const STATES = new Map([
  ["pending", "pending"],
  ["pending post", "posted"],
  ["pending void", "voided"],
  ["pending void reinstate", "reinstated"],
]);

/** Returns what a receipt proves about a claim; throws an error if the receipt is not valid. */
export async function check(bytes, roundId, claimId) {
  const receipt = decode(bytes);
  demand(receipt instanceof Map && receipt.get("kind") === "echo-swarm/receipt", "This file is not a receipt.");
  const keys = (await ledgerRoots(receipt.get("roots"), roundId)).map((root) => root.key); // (1)
  const checkpoint = await openCheckpoint(receipt.get("checkpoint"), keys, `echo-swarm/${roundId}`); // (2)
  const entries = [];
  for (const item of receipt.get("entries")) {
    const root = await rootByInclusion(item.get("entry"), item.get("index"), checkpoint.size, item.get("proof"));
    demand(equal(root, checkpoint.root), `Entry ${item.get("index")} is not in the tree of the checkpoint.`);
    entries.push(decode(item.get("entry")));
  }
  const kinds = entries.map((entry) => entry.get("kind")).join(" ");
  const isClaims = entries.every((entry) => entry.get("claim_id") === claimId);
  const isOneOf = STATES.has(kinds) && kinds.split(" ").length === entries.length;
  demand(isClaims && isOneOf, "The receipt is not about this claim.");
  const [credit] = entries;
  return {
    nodeId: credit.get("node_id"),
    tokens: credit.get("tokens"),
    amountMicros: credit.get("amount_micros"),
    state: STATES.get(kinds),
    size: checkpoint.size,
  };
}

// (3)

async function rootByInclusion(entry, index, size, proof) {
  demand(Number.isSafeInteger(index) && index >= 0 && index < size, "The index in the proof is beyond the end of the log.");
  const sides = [];
  for (let [start, end] = [0, size]; end - start > 1;) {
    const middle = start + split(end - start);
    sides.unshift(index < middle ? "right" : "left");
    if (index < middle) end = middle;
    else start = middle;
  }
  demand(proof.length === sides.length && sides.length <= PROOF_MAX, "The proof has the wrong length for this tree.");
  let hash = await sha256(concat(Uint8Array.of(0), entry));
  for (const [place, side] of sides.entries()) {
    const sibling = proof[place];
    demand(sibling.length === HASH_BYTES, "A hash in the proof has the wrong length.");
    const pair = side === "right" ? [hash, sibling] : [sibling, hash];
    hash = await sha256(concat(Uint8Array.of(1), ...pair));
  }
  return hash;
}

function split(count) {
  let half = 1;
  while (2 * half < count) half *= 2;
  return half;
}
