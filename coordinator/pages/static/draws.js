// The lottery of audits: which claims a revealed secret draws, and that no drawn claim was paid without an audit.

import { blake3 } from "./blake.js";
import { concat, concatAll, demand, hex, textOf, utf8 } from "./signed.js";

const ALL_PPM = 1_000_000;

export class Audits {
  #credited = new Map(); // claim → index of its credit
  #posted = new Map();
  #verdicts = new Map(); // claim → [index, outcome]
  #listed = new Set();
  reveals = []; // [index, entry]
  drawn = 0;

  add(index, entry) {
    if (entry.kind === "pending") this.#credited.set(entry.claim_id, index);
    if (entry.kind === "post") this.#posted.set(entry.claim_id, index);
    if (entry.kind === "verdict") this.#verdicts.set(entry.claim_id, [index, entry.outcome]);
    if (entry.kind === "reveal") this.reveals.push([index, entry]);
  }

  get claims() {
    return this.#listed.size;
  }

  /** Checks the published list of a revealed epoch. */
  checkList([index, reveal], data) {
    const draws = parseDraws(data, reveal.epoch);
    demand(hex(blake3(encodeDraws(draws))) === reveal.draws_digest, `The list of epoch ${reveal.epoch} is not the one that entry ${index} names.`, index);
    for (const [claim, rate] of draws) {
      const known = this.#credited.has(claim) && !this.#listed.has(claim);
      demand(known, `The list of epoch ${reveal.epoch} names a claim twice, or one that the ledger does not have.`, index);
      this.#listed.add(claim);
      if (!isDrawn(reveal.secret, claim, rate)) continue;
      this.drawn += 1;
      this.#demandVerdict(claim, "was drawn");
    }
  }

  /** Checks the claims that are in no list, and those that an audit found wrong. */
  finish() {
    const ends = this.reveals.slice(0, -1);
    const end = ends.length ? ends.at(-1)[0] : -1;
    for (const [claim, index] of this.#credited) {
      if (index < end && !this.#listed.has(claim)) this.#demandVerdict(claim, "is in no epoch's list");
    }
    for (const [claim, [index, outcome]] of this.#verdicts) {
      const paid = this.#posted.get(claim) ?? -1;
      demand(outcome !== "hard" || paid < index, `Entry ${paid} pays a claim that an audit had found wrong.`, paid);
    }
  }

  #demandVerdict(claim, why) {
    const paid = this.#posted.get(claim);
    const audited = this.#verdicts.get(claim)?.[0] ?? Infinity;
    demand(paid === undefined || audited < paid, `Entry ${paid} pays claim ${claim.slice(0, 16)}…, which ${why}, and no audit had looked at it.`, paid);
  }
}

function parseDraws(data, epoch) {
  try {
    const draws = JSON.parse(textOf(data));
    const sound = ([claim, rate, ...others]) =>
      /^[0-9a-f]{64}$/.test(claim) && Number.isInteger(rate) && rate >= 0 && rate <= ALL_PPM && others.length === 0;
    if (draws.every(sound)) return draws;
  } catch {
    // reported below
  }
  return demand(false, `The list of epoch ${epoch} is not one of claims and rates.`);
}

function isDrawn(secret, claim, rate) {
  const ticket = new DataView(blake3(utf8(claim), secret).buffer).getBigUint64(0);
  return ticket * BigInt(ALL_PPM) < BigInt(rate) << 64n;
}

// The list as canonical MessagePack: pairs of a text of 64 characters and a whole number.
function encodeDraws(draws) {
  const head = draws.length < 16 ? [0x90 | draws.length]
    : draws.length < 65_536 ? [0xdc, draws.length >> 8, draws.length & 255]
      : [0xdd, draws.length >>> 24, (draws.length >> 16) & 255, (draws.length >> 8) & 255, draws.length & 255];
  const pairs = draws.map(([claim, rate]) => concat(Uint8Array.of(0x92, 0xd9, 64), utf8(claim), encodeWhole(rate)));
  return concatAll([Uint8Array.from(head), ...pairs]);
}

function encodeWhole(value) {
  if (value < 128) return Uint8Array.of(value);
  if (value < 256) return Uint8Array.of(0xcc, value);
  if (value < 65_536) return Uint8Array.of(0xcd, value >> 8, value & 255);
  return Uint8Array.of(0xce, value >>> 24, (value >> 16) & 255, (value >> 8) & 255, value & 255);
}
