// The kinds of entries of a ledger and their fields, as docs/ledger.md lists them. Any other field is refused.

import { decode } from "./msgpack.js";
import { demand } from "./signed.js";

const MTOK = 1_000_000n;
const CLAIM_MAX_TOKENS = 64 * 32_768;
const PRICE_MAX = 1e12;
const DEPOSITS_MAX = 2n ** 62n;
const COUNT_MAX = 2 ** 40;
const WHOLE_MAX = 2n ** 64n - 1n; // the largest number of a message

const isText = (pattern) => (value) => typeof value === "string" && pattern.test(value);
const isWhole = (least, most) => (value) =>
  (typeof value === "bigint" || Number.isInteger(value)) && value >= least && value <= most;
const isOneOf = (...words) => (value) => words.includes(value);

const BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz";
const PEER_PREFIX = 0x002408011220n; // libp2p's, of the id of an Ed25519 key of 32 bytes
const known = new Set();

// A node's id is base58 of the prefix and its public key.
function node(value) {
  if (known.has(value)) return true;
  if (typeof value !== "string" || !/^1[1-9A-HJ-NP-Za-km-z]{51}$/.test(value)) return false;
  const number = [...value].reduce((sum, character) => sum * 58n + BigInt(BASE58.indexOf(character)), 0n);
  if (number >> 256n === PEER_PREFIX && value[1] !== "1") known.add(value);
  return known.has(value);
}

const hash = isText(/^[0-9a-f]{64}$/);
const reference = isText(/^[A-Za-z0-9._/-]{1,100}$/);
const reason = isText(/^[a-z][a-z0-9_]{0,63}$/);
const money = isWhole(1, DEPOSITS_MAX);
const count = isWhole(1, COUNT_MAX);
const anyCount = isWhole(0, COUNT_MAX);
const batch = isWhole(1, 1e9);

const FIELDS = {
  deposit: { reference, amount_micros: money },
  pending: {
    claim_id: hash, lease_id: isText(/^[0-9a-f]{32}$/), node_id: node, tokens: isWhole(1, CLAIM_MAX_TOKENS),
    price_micros_per_mtok: isWhole(0, PRICE_MAX), amount_micros: isWhole(0, DEPOSITS_MAX),
  },
  post: { claim_id: hash },
  void: { claim_id: hash, reason_code: reason },
  version: { version: count, manifest_digest: hash },
  root: { version: count, root_digest: hash },
  commitment: { epoch: count, secret_digest: hash },
  reveal: { epoch: count, secret: (value) => value instanceof Uint8Array && value.length === 32, draws_digest: hash },
  verdict: {
    claim_id: hash, outcome: isOneOf("pass", "soft", "hard", "pardon"), validator: isText(/^[a-z]{1,20}\/[0-9]{1,6}$/),
    evidence_digest: hash,
  },
  appeal: { claim_id: hash, statement_digest: hash },
  ruling: { claim_id: hash, outcome: isOneOf("granted", "denied"), reason_code: reason },
  reinstate: { claim_id: hash, appealed_claim_id: hash, reason_code: reason },
  owner: {
    owner: node, number: isWhole(1, 2 ** 53), act: isOneOf("delegation", "revocation", "address"),
    node_id: (value) => value === null || node(value), statement_digest: hash,
  },
  payout_batch: { batch, payees_root: hash, payees: isWhole(1, WHOLE_MAX), amount_micros: money },
  batch: { number: count, groups: isWhole(1, WHOLE_MAX), groups_root: hash },
  update: {
    update: count, attempt: count, before: hash, after: hash, groups_root: hash, settings_digest: hash,
    seed: isWhole(-(2n ** 63n), WHOLE_MAX), steps: isWhole(0, WHOLE_MAX), replaced_by: anyCount,
  },
  retraction: {
    version: count, owners: (value) => Array.isArray(value) && value.length > 0 && value.length <= 256 && value.every(node),
    first: count, last: count, before: hash, after: hash, left_out: isWhole(1, WHOLE_MAX), left_out_root: hash,
  },
  payout: { batch, node_id: node, amount_micros: money },
  paid: { batch, node_id: node, reference },
};

/** Returns the fields of entry `index`; throws an error unless they are exactly those of its kind. */
export function parseEntry(bytes, index) {
  const entry = Object.fromEntries(decoded(bytes, index));
  const isKnown = typeof entry.kind === "string" && Object.hasOwn(FIELDS, entry.kind); // a list of a name is no name
  const fields = isKnown ? FIELDS[entry.kind] : null;
  demand(fields, `Entry ${index} is of no kind that this page knows: ${String(entry.kind).slice(0, 40)}.`, index);
  const names = Object.keys(entry).length - 1;
  const sound = names === Object.keys(fields).length && Object.entries(fields).every(([name, holds]) => holds(entry[name]));
  demand(sound, `Entry ${index} does not have the fields of a ${entry.kind}.`, index);
  if (entry.kind === "pending") {
    const owed = (BigInt(entry.tokens) * BigInt(entry.price_micros_per_mtok)) / MTOK;
    demand(owed === BigInt(entry.amount_micros), `Entry ${index} credits another amount than its tokens at its price.`, index);
  }
  return entry;
}

function decoded(bytes, index) {
  let value = null;
  try {
    value = decode(bytes);
  } catch (error) {
    demand(false, `Entry ${index} is not a canonical message: ${error.message}`, index);
  }
  demand(value instanceof Map, `Entry ${index} is not a message.`, index);
  return value;
}
