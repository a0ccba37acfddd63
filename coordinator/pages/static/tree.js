// The Merkle tree of RFC 6962 over the entries of a log, and the entries of its static files (C2SP tlog-tiles).

import { HASH_BYTES, concat, demand, sha256 } from "./signed.js";

export const WIDTH = 256;

const leafHash = (entry) => sha256(concat(Uint8Array.of(0), entry));
const innerHash = (left, right) => sha256(concat(Uint8Array.of(1), left, right));

/** Returns the largest power of two below `count`. */
function half(count) {
  let size = 1;
  while (2 * size < count) size *= 2;
  return size;
}

export class Tree {
  #leaves = []; // for each file of entries, the hashes of its leaves
  #roots = []; // the root of each of them that is full
  size = 0;

  /** Adds the entries that follow; a file of 256 is completed before the next one begins. */
  async add(entries) {
    await this.addHashes(await Promise.all(entries.map(leafHash)));
  }

  async addHashes(hashes) {
    for (const hash of hashes) {
      const number = Math.floor(this.size / WIDTH);
      this.#leaves[number] ??= [];
      this.#leaves[number].push(hash);
      this.size += 1;
      if (this.size % WIDTH === 0) this.#roots[number] = await perfect(this.#leaves[number]);
    }
  }

  leaf(index) {
    return this.#leaves[Math.floor(index / WIDTH)][index % WIDTH];
  }

  /** Returns the root of the first `size` entries. */
  async root(size) {
    return size ? this.#range(0, size) : sha256(new Uint8Array());
  }

  async #range(start, end) {
    if (end - start === 1) return this.leaf(start);
    if (end - start === WIDTH && start % WIDTH === 0) return this.#roots[start / WIDTH];
    const middle = start + half(end - start);
    return innerHash(await this.#range(start, middle), await this.#range(middle, end));
  }
}

async function perfect(hashes) {
  let level = hashes;
  while (level.length > 1) {
    const pairs = Array.from({ length: level.length / 2 }, (_, place) => innerHash(level[2 * place], level[2 * place + 1]));
    level = await Promise.all(pairs);
  }
  return level[0];
}

/** Returns the name of a file of the log: of entries, or of the hashes of its leaves ("0"). */
export function tileName(shelf, number, width) {
  const digits = String(number);
  const groups = digits.padStart(Math.ceil(digits.length / 3) * 3, "0").match(/.{3}/g);
  const name = groups.map((group, place) => (place < groups.length - 1 ? `x${group}` : group)).join("/");
  return `ledger/tile/${shelf}/${name}${width < WIDTH ? `.p/${width}` : ""}`;
}

/** Returns the first `width` entries of a file of entries. */
export function unbundle(data, first, width) {
  const entries = [];
  let place = 0;
  while (place < data.length && entries.length < width) {
    const end = place + 2 + (data[place] << 8 | data[place + 1]);
    demand(end <= data.length, `The file that has entry ${first + entries.length} ends in the middle of it.`, first + entries.length);
    entries.push(data.subarray(place + 2, end));
    place = end;
  }
  const lacking = first + entries.length;
  demand(entries.length >= width, `Entry ${lacking} is missing: the log was cut off before it.`, lacking);
  return entries;
}

/** Returns the hashes of a file of leaf hashes. */
export function hashesOf(data, width) {
  demand(data.length >= width * HASH_BYTES, "A file of hashes is too short.");
  return Array.from({ length: width }, (_, place) => data.slice(place * HASH_BYTES, (place + 1) * HASH_BYTES));
}
