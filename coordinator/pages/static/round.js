// Checks a whole round from its public files, as `swarm-node ledger verify` does (docs/ledger.md, "The log"):
//
// (1) the root documents are one chain, from the pinned one; the checkpoint is signed by the newest ledger key;
// (2) every entry is valid and possible after those before it;
// (3) the leaderboard shows, for every node, the sums of the first `ledger_size` entries;
// (4) all entries give the signed root, and the first entries the roots that witnesses signed;
// (5) the log names exactly the root documents that are served, and goes on where a gap says so;
// (6) the audits are those that the lottery drew.
//
// - The leaderboard and the witnesses' notes are fetched first, then a checkpoint that covers them, then the root documents.
// - `files.get(path, maxBytes)` returns bytes, or null for a file that does not exist.

import { blake3 } from "./blake.js";
import { Book } from "./book.js";
import { Audits } from "./draws.js";
import { parseEntry } from "./entries.js";
import { decode } from "./msgpack.js";
import { Unproved, demand, equal, hex, isCosigned, ledgerRoots, openCheckpoint, parseNote, sha256, textOf } from "./signed.js";
import { Tree, WIDTH, hashesOf, tileName, unbundle } from "./tree.js";

const PATIENCE_MS = 30_000;
const AGAIN_MS = 500;
const AHEAD = 6; // files of entries that are asked for at once
const ROOTS_MAX = 256;
const MIB = 2 ** 20;
const NOTE_MAX = 16_384;
const NAME = /^[!-~]{1,100}$/; // of a witness, if it is to be shown

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

export class RoundCheck {
  #tree = new Tree();
  #book = new Book();
  #audits = new Audits();
  #board = null;
  #roots = [];
  #chain = [];
  #checkpoint = null;

  constructor(files, { roundId = "", witnesses = [], progress = () => {} } = {}) {
    this.files = files;
    this.roundId = roundId;
    this.isPinned = roundId !== "";
    this.witnesses = witnesses;
    this.progress = progress;
  }

  /** Returns what is proved; throws an `Unproved` error at the first mistake. */
  async run() {
    const end = Date.now() + PATIENCE_MS;
    this.#board = readBoard(await this.#need("leaderboard", 64 * MIB));
    const notes = await this.#notes();
    await this.#cover(this.#board.size, end, `The leaderboard counts ${this.#board.size} entries, and no signed checkpoint covers so many.`);
    if (this.#board.size === 0) this.#checkBoard();
    await this.#read();
    this.#checkLoggedRoots();
    while (this.#book.roots.length > 0 && this.#book.roots.length < this.#roots.length) {
      await this.#cover(this.#tree.size + 1, end, `Root document ${this.#book.roots.length + 1} is served, and no entry names it: these keys may be shown to you alone.`);
      await this.#read();
      this.#checkLoggedRoots();
    }
    await this.#checkGaps();
    const witnessed = await this.#checkNotes(notes);
    await this.#checkAudits();
    return {
      roundId: this.roundId, size: this.#checkpoint.size, root: hex(this.#checkpoint.root), roots: this.#roots.length,
      loggedRoots: this.#book.roots.length, boardNodes: this.#board.rows.size, boardSize: this.#board.size,
      owedMicros: this.#book.owed(), drawn: this.#audits.drawn, claims: this.#audits.claims,
      updates: this.#book.training.last, unit: unitOf(this.#roots.at(-1)),
      gaps: this.#chain.filter((root) => root.resumed).map((root) => root.resumed), ...witnessed,
    };
  }

  get origin() {
    return `echo-swarm/${this.roundId}`;
  }

  // The ledger's keys, the newest first; a key counts once.
  get #keys() {
    const seen = new Map(this.#chain.map((root) => [hex(root.key), root.key]));
    return [...seen.values()].reverse();
  }

  async #need(path, maxBytes) {
    const data = await this.files.get(path, maxBytes);
    demand(data, `The server has no ${path}.`);
    return data;
  }

  // (1)

  async #cover(size, end, otherwise) {
    for (let refused = null; ;) {
      const note = await this.#need("ledger/checkpoint", NOTE_MAX);
      await this.#fetchRoots();
      const newest = this.#keys.slice(0, 1);
      const checkpoint = await openCheckpoint(note, newest, this.origin).catch((error) => error);
      if (checkpoint instanceof Error) {
        if (refused !== null && equal(refused, note)) throw checkpoint;
        refused = note; // its key may have just been replaced
      } else if (checkpoint.size >= size) {
        this.#checkpoint = checkpoint;
        return;
      }
      demand(Date.now() < end, otherwise);
      await pause(AGAIN_MS);
    }
  }

  async #fetchRoots() {
    const known = this.#roots.length;
    while (this.#roots.length < ROOTS_MAX) {
      const data = await this.files.get(`metadata/${this.#roots.length + 1}.root.json`, MIB / 4);
      if (data === null) break;
      this.#roots.push(data);
    }
    demand(this.#roots.length, "The server has no root document: is this the address of a coordinator?");
    this.roundId ||= hex(await sha256(this.#roots[0]));
    if (this.#roots.length > known) this.#chain = await ledgerRoots(this.#roots, this.roundId);
  }

  // (2), (3), (4)

  async #read() {
    const { size, root } = this.#checkpoint;
    const last = Math.ceil(size / WIDTH);
    const coming = [];
    for (let number = Math.floor(this.#tree.size / WIDTH), asked = number; number < last; number++) {
      for (; asked < Math.min(last, number + AHEAD); asked++) coming.push(settled(this.#bundle(asked, size)));
      await this.#add((await coming.shift())().slice(this.#tree.size - number * WIDTH));
      this.progress(this.#tree.size, size);
    }
    if (equal(await this.#tree.root(size), root)) return demand(!this.#book.problem(), this.#book.problem());
    return this.#blame(new Unproved(`The ${size} entries do not give the root that is signed for them.`));
  }

  async #bundle(number, size) {
    const width = Math.min(WIDTH, size - number * WIDTH);
    const data = (await this.files.get(tileName("entries", number, width), 17 * MIB))
      ?? (await this.files.get(tileName("entries", number, WIDTH), 17 * MIB));
    const first = number * WIDTH;
    demand(data, `Entry ${first} is missing: the log was cut off before it.`, first);
    return unbundle(data, first, width);
  }

  async #add(bodies) {
    const first = this.#tree.size;
    await this.#tree.add(bodies);
    try {
      for (const [place, body] of bodies.entries()) {
        const entry = parseEntry(body, first + place);
        this.#book.add(first + place, entry);
        this.#audits.add(first + place, entry);
        if (first + place + 1 === this.#board.size) this.#checkBoard();
      }
    } catch (error) {
      if (!(error instanceof Unproved) || error.entry === null) throw error;
      await this.#blame(error);
    }
  }

  // Throws an error that names the entry which is not the signed one, if the published hashes show that; else `error`.
  async #blame(error) {
    const { size, root } = this.#checkpoint;
    const signed = new Tree();
    for (let number = 0; number * WIDTH < size; number++) {
      const width = Math.min(WIDTH, size - number * WIDTH);
      const data = (await this.files.get(tileName("0", number, width), MIB)) ?? (await this.files.get(tileName("0", number, WIDTH), MIB));
      if (data === null) throw error;
      await signed.addHashes(hashesOf(data, width));
    }
    if (!equal(await signed.root(size), root)) {
      throw new Unproved(`${error.message} The published hashes do not give the signed root either.`, error.entry);
    }
    for (let index = 0; index < this.#tree.size; index++) {
      if (equal(signed.leaf(index), this.#tree.leaf(index))) continue;
      throw new Unproved(`Entry ${index} was altered: it is not the one that the signed root contains.`, index);
    }
    throw error;
  }

  #checkBoard() {
    const expected = this.#book.rows();
    for (const [node, row] of this.#board.rows) {
      for (const [name, shown] of Object.entries(row)) {
        const sum = expected.get(node)?.[name] ?? 0n;
        demand(sum === shown, `The leaderboard shows ${shown} as ${name} of node ${node}; its entries sum to ${sum}.`);
      }
    }
    for (const node of expected.keys()) {
      demand(this.#board.rows.has(node), `The leaderboard does not show node ${node}, which has entries.`);
    }
  }

  // (4)

  async #notes() {
    const data = await this.files.get("ledger/cosigned", MIB);
    const notes = data ? listOf(data) : [];
    demand(Array.isArray(notes) && notes.every((note) => note instanceof Uint8Array), "The list of witnesses' notes is malformed.");
    return notes;
  }

  async #checkNotes(notes) {
    const sizes = new Map(); // witness → the most entries that it has signed
    const names = new Set(); // as the server writes them: their keys are unknown
    let beginnings = 0;
    for (const note of notes) {
      const signed = await openCheckpoint(note, this.#keys, this.origin);
      for (const { name } of parseNote(note).lines) if (name !== this.origin && NAME.test(name)) names.add(name);
      if (this.#isLost(signed)) continue;
      demand(signed.size <= this.#tree.size, `A witness has signed ${signed.size} entries, and the log has ${this.#tree.size}: it was cut off.`, this.#tree.size);
      const root = await this.#tree.root(signed.size);
      demand(equal(root, signed.root), `A witness was shown another history: its ${signed.size} entries are not the first of these.`);
      beginnings += 1;
      for (const witness of this.witnesses) {
        if (await isCosigned(signed, witness)) sizes.set(witness.text, Math.max(signed.size, sizes.get(witness.text) ?? 0));
      }
    }
    return { beginnings, witnessNames: [...names].sort(), witnessed: Object.fromEntries(sizes) };
  }

  // True if a note covers entries that were lost in a gap after its key.
  #isLost({ signer, size }) {
    const key = hex(this.#keys[signer]);
    const since = this.#chain.findIndex((root) => hex(root.key) === key);
    return this.#chain.slice(since + 1).some((root) => root.resumed && root.resumed.size < size);
  }

  // (5)

  #checkLoggedRoots() {
    for (const [place, [index, entry]] of this.#book.roots.entries()) {
      demand(entry.version === place + 1, `Entry ${index} names root document ${entry.version}; ${place + 1} would be the next.`, index);
      demand(place < this.#roots.length, `Entry ${index} names root document ${place + 1}, which is not served: newer keys are withheld.`, index);
      const served = hex(blake3(this.#roots[place]));
      demand(served === entry.root_digest, `Root document ${place + 1} is not the one that entry ${index} names: you are shown other keys.`, index);
    }
  }

  async #checkGaps() {
    const places = new Map(this.#book.roots.map(([index, entry]) => [entry.version, index]));
    const entries = new Set(places.values());
    for (const [place, { key, resumed }] of this.#chain.entries()) {
      if (!resumed) continue;
      demand(isGap(resumed), `Root document ${place + 1} declares a gap that is malformed.`);
      const isNew = !this.#chain.slice(0, place).some((before) => equal(before.key, key));
      demand(isNew, `Root document ${place + 1} declares a gap, and names an old ledger key.`);
      if (this.#chain.slice(place + 1).some((later) => later.resumed && later.resumed.size <= resumed.size)) continue;
      const index = places.get(place + 1) ?? -1;
      let follows = index >= resumed.size;
      for (let between = resumed.size; follows && between < index; between++) follows = entries.has(between);
      const isSame = follows && hex(await this.#tree.root(resumed.size)) === resumed.root;
      demand(isSame, `Root document ${place + 1} says that the log goes on after ${resumed.size} entries, and it does not.`, resumed.size);
    }
    this.#chain.forEach(({ key }, place) => {
      const first = this.#chain.findIndex((root) => equal(root.key, key));
      const old = this.#chain.slice(first + 1, place + 1).some((root) => root.resumed);
      demand(!old, `Root document ${place + 1} names a ledger key from before a gap.`);
    });
  }

  // (6)

  async #checkAudits() {
    for (const reveal of this.#audits.reveals) {
      this.#audits.checkList(reveal, await this.#need(`audits/${reveal[1].epoch}`, 64 * MIB));
    }
    this.#audits.finish();
  }
}

// A function that returns the result or throws its error: a later file's error waits for its turn.
const settled = (promise) => promise.then((value) => () => value, (error) => () => { throw error; });

function isGap(field) {
  const names = Object.keys(field).sort().join();
  return names === "lost_size,root,size" && Number.isSafeInteger(field.size) && field.size >= 0
    && Number.isSafeInteger(field.lost_size) && field.lost_size >= field.size && /^[0-9a-f]{64}$/.test(field.root);
}

function listOf(data) {
  try {
    return decode(data).get("notes");
  } catch {
    return null;
  }
}

const SUMS = ["posted_micros", "pending_micros", "voided_micros", "validated_tokens"];

function readBoard(data) {
  let board = null;
  try {
    board = JSON.parse(textOf(data));
  } catch {
    // reported below
  }
  const isSum = (value) => Number.isSafeInteger(value) && value >= 0; // a larger one was rounded by this browser
  const sound = isSum(board?.ledger_size) && Array.isArray(board.nodes)
    && board.nodes.every((row) => typeof row?.node_id === "string" && SUMS.every((name) => isSum(row[name])));
  demand(sound, "The leaderboard is malformed, or has sums that a browser cannot represent.");
  const rows = new Map(board.nodes.map((row) => [row.node_id, Object.fromEntries(SUMS.map((name) => [name, BigInt(row[name])]))]));
  demand(rows.size === board.nodes.length, "The leaderboard shows a node twice.");
  return { size: board.ledger_size, rows };
}

function unitOf(root) {
  const name = JSON.parse(textOf(root)).signed["x-echo-swarm-unit"]?.name;
  return typeof name === "string" ? name.slice(0, 20) : "credits";
}
