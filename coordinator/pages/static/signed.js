// Signatures and documents of a round's ledger: bytes, Ed25519, the chain of root documents, and signed notes.
//
// - A wrong document is an `Unproved` error, which names an entry of the log where there is one.

export const HASH_BYTES = 32;
export const utf8 = (text) => new TextEncoder().encode(text);
export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
export const sha256 = async (bytes) => new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
export const equal = (left, right) => left.length === right.length && left.every((byte, place) => byte === right[place]);

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export class Unproved extends Error {
  constructor(message, entry = null) {
    super(message);
    this.entry = entry;
  }
}

export function demand(holds, otherwise, entry = null) {
  if (!holds) throw new Unproved(otherwise, entry);
}

export function textOf(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    throw new Unproved("A document is not UTF-8.");
  }
}

export function unhex(text) {
  demand(typeof text === "string" && /^([0-9a-f]{2})*$/.test(text), "A key or signature is not written in hexadecimal.");
  return Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

export function unbase64(text) {
  try {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    if (btoa(String.fromCharCode(...bytes)) === text) return bytes;
  } catch {
    // reported below
  }
  throw new Unproved("A key, hash or signature is not canonical base64.");
}

export const concat = (...parts) => concatAll(parts);

export function concatAll(parts) {
  const joined = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let place = 0;
  for (const part of parts) {
    joined.set(part, place);
    place += part.length;
  }
  return joined;
}

export async function isSigned(publicKey, signature, data) {
  const key = await crypto.subtle.importKey("raw", publicKey, { name: "Ed25519" }, false, ["verify"]);
  return crypto.subtle.verify({ name: "Ed25519" }, key, signature, data);
}

/** Returns what this browser lacks to check signatures; empty if nothing. */
export async function missing() {
  if (!globalThis.crypto?.subtle) return "Browsers can check signatures only on pages loaded over https or from this machine.";
  try {
    await crypto.subtle.importKey("raw", new Uint8Array(32), { name: "Ed25519" }, false, ["verify"]);
    return "";
  } catch (error) {
    return error.name === "NotSupportedError" ? "This browser does not support Ed25519 signatures." : "";
  }
}

/** Returns, for each root document of a round's chain, the ledger key and the gap that it declares (or undefined). */
export async function ledgerRoots(roots, roundId) {
  demand(hex(await sha256(roots[0])) === roundId, "The first root document is not that of this round: its keys are other ones.");
  const parsed = roots.map(parseRoot);
  for (const [place, root] of parsed.entries()) {
    const before = parsed[Math.max(0, place - 1)];
    demand(place === 0 || root.signed.version === before.signed.version + 1, "A root document is missing in the chain.");
    await demandThreshold(root, before.signed);
    await demandThreshold(root, root.signed);
  }
  return parsed.map((root) => {
    const key = root.signed["x-echo-swarm-ledger"];
    demand(key?.keytype === "ed25519" && key.keyval?.public?.length === 64, "A root document names no ledger key.");
    return { key: unhex(key.keyval.public), resumed: root.signed["x-echo-swarm-resumed"] };
  });
}

function parseRoot(bytes) {
  try {
    const root = JSON.parse(textOf(bytes));
    if (root.signed._type === "root" && root.signed.roles.root && root.signed.keys && root.signatures) return root;
  } catch {
    // reported below
  }
  throw new Unproved("A root document is not one of trust metadata.");
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

const keyId = async (name, kind, key) => (await sha256(concat(utf8(`${name}\n`), Uint8Array.of(kind), key))).subarray(0, 4);

/** Returns the text of a signed note, and its signature lines. */
export function parseNote(note) {
  const written = textOf(note);
  const end = written.lastIndexOf("\n\n");
  demand(end > 0 && written.endsWith("\n"), "The checkpoint has no signature.");
  const lines = written.slice(end + 2, -1).split("\n").map((line) => {
    const [dash, name, value, ...others] = line.split(" ");
    demand(dash === "—" && value && others.length === 0, "The checkpoint has a line that is no signature.");
    const raw = unbase64(value);
    return { name, id: raw.subarray(0, 4), value: raw.subarray(4) };
  });
  return { text: written.slice(0, end + 1), lines };
}

async function lineOf(lines, name, kind, key) {
  const id = await keyId(name, kind, key);
  return lines.find((line) => line.name === name && equal(line.id, id));
}

/** Returns the checkpoint of a note that one of these ledger keys has signed, and the key's place among them. */
export async function openCheckpoint(note, keys, origin) {
  const { text, lines } = parseNote(note);
  for (const [signer, key] of keys.entries()) {
    const line = await lineOf(lines, origin, 1, key);
    if (!line) continue;
    demand(await isSigned(key, line.value, utf8(text)), "The checkpoint's signature is not valid.");
    return { ...readCheckpoint(text, origin), signer, text, lines };
  }
  throw new Unproved("No ledger key of this round has signed the checkpoint.");
}

function readCheckpoint(text, origin) {
  const match = /^(\S+)\n(0|[1-9][0-9]{0,14})\n([A-Za-z0-9+/=]{44})\n$/.exec(text);
  demand(match && match[1] === origin, "The checkpoint is not one of this round.");
  return { size: Number(match[2]), root: unbase64(match[3]) };
}

/** Returns the key of a witness in its written form, `name+id+base64`. */
export async function parseWitness(text) {
  const match = /^([^\s+]{1,200})\+([0-9a-f]{8})\+([A-Za-z0-9+/=]+)$/.exec(text);
  const raw = match ? unbase64(match[3]) : new Uint8Array();
  const sound = raw.length === 33 && raw[0] === 4 && hex(await keyId(match[1], 4, raw.subarray(1))) === match[2];
  demand(sound, `${text.slice(0, 60)} is not the key of a witness; one looks like name+0a1b2c3d+Base64=.`);
  return { name: match[1], key: raw.subarray(1), text };
}

/** Returns true if this witness has signed an opened checkpoint; throws an error if its signature is wrong. */
export async function isCosigned({ text, lines }, witness) {
  const line = await lineOf(lines, witness.name, 4, witness.key);
  if (!line) return false;
  demand(line.value.length === 72, `The signature of ${witness.name} has the wrong length.`);
  const time = new DataView(line.value.buffer, line.value.byteOffset).getBigUint64(0);
  const signed = utf8(`cosignature/v1\ntime ${time}\n${text}`);
  demand(await isSigned(witness.key, line.value.subarray(8), signed), `The signature of ${witness.name} is not valid.`);
  return true;
}
