// Checks a receipt of the ledger as docs/protocol.md specifies:
//
// (1) the first root document hashes to the round id; each later one is signed by the previous one's keys and its own;
// (2) the checkpoint is signed by a ledger key that one of these roots names;
// (3) each entry, hashed with its proof, gives the checkpoint's root;
// (4) the entries are the credit and, if there is one, the settlement of the requested claim.

import { decode } from "./msgpack.js";

const PROOF_MAX = 64;
const HASH_BYTES = 32;
const utf8 = (text) => new TextEncoder().encode(text);
const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
const sha256 = async (bytes) => new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
const unbase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

function demand(holds, otherwise) {
  if (!holds) throw new Error(otherwise);
}

function unhex(text) {
  demand(/^([0-9a-f]{2})*$/.test(text), "A key or signature is not written in hexadecimal.");
  return Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

function concat(...parts) {
  const joined = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let place = 0;
  for (const part of parts) {
    joined.set(part, place);
    place += part.length;
  }
  return joined;
}

const equal = (left, right) => left.length === right.length && left.every((byte, place) => byte === right[place]);

async function isSigned(publicKey, signature, data) {
  const key = await crypto.subtle.importKey("raw", publicKey, { name: "Ed25519" }, false, ["verify"]);
  return crypto.subtle.verify({ name: "Ed25519" }, key, signature, data);
}

/** Returns what this browser lacks to check receipts; empty if nothing. */
export async function missing() {
  if (!globalThis.crypto?.subtle) return "Browsers can check receipts only on pages loaded over https or from this machine.";
  try {
    await crypto.subtle.importKey("raw", new Uint8Array(32), { name: "Ed25519" }, false, ["verify"]);
    return "";
  } catch (error) {
    return error.name === "NotSupportedError" ? "This browser does not support Ed25519 signatures." : "";
  }
}

/** Returns what a receipt proves about a claim; throws an error if the receipt is not valid. */
export async function check(bytes, roundId, claimId) {
  const receipt = decode(bytes);
  demand(receipt instanceof Map && receipt.get("kind") === "echo-swarm/receipt", "This file is not a receipt.");
  const keys = await ledgerKeys(receipt.get("roots"), roundId);
  const checkpoint = await openCheckpoint(receipt.get("checkpoint"), keys, `echo-swarm/${roundId}`);
  const entries = [];
  for (const item of receipt.get("entries")) {
    const root = await rootByInclusion(item.get("entry"), item.get("index"), checkpoint.size, item.get("proof"));
    demand(equal(root, checkpoint.root), `Entry ${item.get("index")} is not in the tree of the checkpoint.`);
    entries.push(decode(item.get("entry")));
  }
  const [credit, settlement, ...others] = entries;
  const isClaims = credit?.get("kind") === "pending" && credit.get("claim_id") === claimId && others.length === 0;
  const isSettled = !settlement
    || (["post", "void"].includes(settlement.get("kind")) && settlement.get("claim_id") === claimId);
  demand(isClaims && isSettled, "The receipt is not about this claim.");
  return {
    nodeId: credit.get("node_id"),
    tokens: credit.get("tokens"),
    amountMicros: credit.get("amount_micros"),
    state: settlement ? { post: "posted", void: "voided" }[settlement.get("kind")] : "pending",
    size: checkpoint.size,
  };
}

// (1)

async function ledgerKeys(roots, roundId) {
  demand(hex(await sha256(roots[0])) === roundId, "The receipt's first root document is not that of this round.");
  const parsed = roots.map((root) => JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(root)));
  for (const [place, root] of parsed.entries()) {
    const before = parsed[Math.max(0, place - 1)];
    demand(root.signed._type === "root", "A root document has the wrong type.");
    demand(place === 0 || root.signed.version === before.signed.version + 1, "A root document is missing in the chain.");
    await demandThreshold(root, before.signed);
    await demandThreshold(root, root.signed);
  }
  return parsed.map((root) => {
    const key = root.signed["x-echo-swarm-ledger"];
    demand(key?.keytype === "ed25519" && key.keyval.public.length === 64, "A root document names no ledger key.");
    return unhex(key.keyval.public);
  });
}

async function demandThreshold(document, signed) {
  const role = signed.roles.root;
  const data = utf8(canonicalJson(document.signed));
  const valid = new Set();
  for (const { keyid, sig } of document.signatures) {
    const key = signed.keys[keyid];
    if (!role.keyids.includes(keyid) || key?.keytype !== "ed25519") continue;
    if (await isSigned(unhex(key.keyval.public), unhex(sig), data)) valid.add(key.keyval.public);
  }
  demand(role.threshold >= 1 && valid.size >= role.threshold, "A root document has too few valid signatures.");
}

// Canonical JSON as TUF signs it: sorted keys, no spaces, and only quotes and backslashes escaped.
function canonicalJson(value) {
  if (typeof value === "string") return `"${value.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`;
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (value === null || typeof value !== "object") return String(value);
  const members = Object.keys(value).sort().map((name) => `${canonicalJson(name)}:${canonicalJson(value[name])}`);
  return `{${members.join(",")}}`;
}

// (2)

async function openCheckpoint(note, keys, origin) {
  const written = new TextDecoder("utf-8", { fatal: true }).decode(note);
  const end = written.lastIndexOf("\n\n");
  demand(end > 0, "The checkpoint has no signature.");
  const text = written.slice(0, end + 1);
  const lines = written.slice(end + 2).split("\n");
  for (const key of keys) {
    const id = (await sha256(concat(utf8(`${origin}\n`), Uint8Array.of(1), key))).subarray(0, 4);
    for (const line of lines) {
      const [dash, name, value] = line.split(" ");
      if (dash !== "—" || name !== origin) continue;
      const raw = unbase64(value);
      if (!equal(raw.subarray(0, 4), id)) continue;
      demand(await isSigned(key, raw.subarray(4), utf8(text)), "The checkpoint's signature is not valid.");
      return readCheckpoint(text, origin);
    }
  }
  throw new Error("No ledger key of this round has signed the checkpoint.");
}

function readCheckpoint(text, origin) {
  const match = /^(\S+)\n(0|[1-9][0-9]{0,14})\n([A-Za-z0-9+/=]{44})\n$/.exec(text);
  demand(match && match[1] === origin, "The checkpoint is not one of this round.");
  return { size: Number(match[2]), root: unbase64(match[3]) };
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
