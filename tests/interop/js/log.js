// The ledger from its static tiles, written from docs/ledger.md, "The log": C2SP's tlog-tiles over RFC 6962.
//
// - Nothing that a tile says is believed: a proof made of tiles must end in the root that the ledger's key has signed.

import { createHash } from 'node:crypto'
import { demand } from './errors.js'
import { signedBy } from './keys.js'
import { get } from './web.js'

const WIDTH = 256
const HASH_BYTES = 32
const ENTRY_MAX_BYTES = 65_535
const NOTE_MAX_BYTES = 64 * 1024

const sha256 = (...parts) => parts.reduce((hash, part) => hash.update(part), createHash('sha256')).digest()
export const leaf = (entry) => sha256(Buffer.of(0), entry)
const parent = (left, right) => sha256(Buffer.of(1), left, right)

const keyId = (name, key) => sha256(`${name}\n`, Buffer.of(1), key).subarray(0, 4)

// A checkpoint that one of these keys has signed: { size, root, note }; lines of witnesses are passed over.
export function readCheckpoint (note, roundId, publicKeys) {
  const origin = `echo-swarm/${roundId}`
  const form = /^(([^\n]+)\n(0|[1-9]\d*)\n([A-Za-z0-9+/]+=*)\n)\n((?:— [^ \n]+ [A-Za-z0-9+/]+=*\n)+)$/
  const [, body, name, size, root, lines] = form.exec(note) ?? []
  const own = name === origin && Buffer.from(root, 'base64').length === HASH_BYTES
  demand(own, 'checkpoint_invalid', 'no checkpoint of this round')
  const signed = lines.trimEnd().split('\n').some((line) => {
    const [, by, text] = line.split(' ')
    const signature = Buffer.from(text, 'base64')
    const key = publicKeys.find((one) => keyId(origin, one).equals(signature.subarray(0, 4)))
    return by === origin && key !== undefined && signedBy(key, Buffer.from(body), signature.subarray(4))
  })
  demand(signed, 'checkpoint_invalid', "the ledger's key has not signed this checkpoint")
  return { size: Number(size), root: Buffer.from(root, 'base64'), note }
}

const split = (size) => 2 ** Math.floor(Math.log2(size - 1)) // the largest power of two below it

// Whether these hashes lead from an entry to the root.
export function included (leafHash, index, size, proof, root) {
  let [at, last, hash] = [index, size - 1, leafHash]
  if (index >= size) return false
  for (const other of proof) {
    if (last === 0) return false
    if (at % 2 === 1 || at === last) {
      hash = parent(other, hash)
      for (; at % 2 === 0 && at !== 0; at /= 2) last = Math.floor(last / 2)
    } else {
      hash = parent(hash, other)
    }
    [at, last] = [Math.floor(at / 2), Math.floor(last / 2)]
  }
  return last === 0 && hash.equals(root)
}

// Whether these hashes show that the older tree is a beginning of the newer.
export function continues (older, newer, proof) {
  if (older.size === newer.size) return proof.length === 0 && older.root.equals(newer.root)
  if (older.size === 0) return proof.length === 0
  const hashes = Number.isInteger(Math.log2(older.size)) ? [older.root, ...proof] : [...proof]
  let [at, last] = [older.size - 1, newer.size - 1]
  for (; at % 2 === 1; at = Math.floor(at / 2)) last = Math.floor(last / 2)
  let old = hashes.shift()
  let fresh = old
  for (const other of hashes) {
    if (last === 0) return false
    if (at % 2 === 1 || at === last) {
      old = parent(other, old)
      fresh = parent(other, fresh)
      for (; at % 2 === 0 && at !== 0; at /= 2) last = Math.floor(last / 2)
    } else {
      fresh = parent(fresh, other)
    }
    [at, last] = [Math.floor(at / 2), Math.floor(last / 2)]
  }
  return last === 0 && (old?.equals(older.root) ?? false) && fresh.equals(newer.root)
}

// The tree under one checkpoint, read from its tiles.
export class Log {
  #tiles = new Map()

  constructor (address, checkpoint) {
    this.base = `${address}/v1/ledger`
    this.size = checkpoint.size
    this.root = checkpoint.root
  }

  // Entry `index`, shown to be in the tree.
  async entry (index) {
    const entry = (await this.#entries(Math.floor(index / WIDTH)))[index % WIDTH]
    const shown = included(leaf(entry), index, this.size, await this.#path(index, 0, this.size), this.root)
    demand(shown, 'proof_invalid', `the tiles do not show that entry ${index} is in the log`)
    return entry
  }

  // Every entry, when all together make the root.
  async entries () {
    const all = []
    for (let n = 0; n * WIDTH < this.size; n++) all.push(...await this.#entries(n))
    const make = (lo, hi) => {
      const middle = lo + split(hi - lo)
      return hi - lo === 1 ? leaf(all[lo]) : parent(make(lo, middle), make(middle, hi))
    }
    const root = this.size === 0 ? sha256() : make(0, this.size)
    demand(root.equals(this.root), 'proof_invalid', 'the entries do not make the signed root')
    return all
  }

  // Demands that an older checkpoint is of a beginning of this log.
  async extend (older) {
    demand(older.size <= this.size, 'rolled_back', 'the checkpoint is shorter than the last one')
    const short = older.size === 0 || older.size === this.size
    const proof = short ? [] : await this.#consistency(older.size, 0, this.size, true)
    demand(continues(older, this, proof), 'proof_invalid', 'the tiles do not show that the log was continued')
  }

  async #path (index, lo, hi) {
    if (hi - lo === 1) return []
    const middle = lo + split(hi - lo)
    return index < middle
      ? [...await this.#path(index, lo, middle), await this.#hash(middle, hi)]
      : [...await this.#path(index, middle, hi), await this.#hash(lo, middle)]
  }

  async #consistency (size, lo, hi, known) {
    if (size === hi) return known ? [] : [await this.#hash(lo, hi)]
    const middle = lo + split(hi - lo)
    return size <= middle
      ? [...await this.#consistency(size, lo, middle, known), await this.#hash(middle, hi)]
      : [...await this.#consistency(size, middle, hi, false), await this.#hash(lo, middle)]
  }

  // The hash over entries lo to hi, from the highest tile that has it.
  async #hash (lo, hi) {
    const span = hi - lo
    const level = Math.log2(span) / 8
    if (Number.isInteger(level)) {
      const at = lo / span
      const tile = await this.#tile(level, Math.floor(at / WIDTH))
      return tile.subarray(at % WIDTH * HASH_BYTES, (at % WIDTH + 1) * HASH_BYTES)
    }
    const middle = lo + split(span)
    return parent(await this.#hash(lo, middle), await this.#hash(middle, hi))
  }

  async #tile (level, n) {
    const hashes = Math.floor(this.size / WIDTH ** level)
    const width = Math.min(WIDTH, hashes - n * WIDTH)
    const data = await this.#get(`tile/${level}/${numbered(n, width)}`, width * HASH_BYTES)
    demand(data.length === width * HASH_BYTES, 'proof_invalid', 'a tile of another width')
    return data
  }

  async #entries (n) {
    const width = Math.min(WIDTH, this.size - n * WIDTH)
    const data = await this.#get(`tile/entries/${numbered(n, width)}`, width * (2 + ENTRY_MAX_BYTES))
    const entries = []
    for (let at = 0; at < data.length; at += 2 + entries.at(-1).length) {
      demand(at + 2 <= data.length, 'proof_invalid', 'half a length')
      entries.push(data.subarray(at + 2, at + 2 + data.readUInt16BE(at)))
    }
    demand(entries.length === width, 'proof_invalid', 'a tile with another number of entries')
    return entries
  }

  async #get (name, maxBytes) {
    if (!this.#tiles.has(name)) {
      const data = await get(`${this.base}/${name}`, maxBytes)
      demand(data, 'proof_invalid', `the log has no ${name}`)
      this.#tiles.set(name, data)
    }
    return this.#tiles.get(name)
  }
}

function numbered (n, width) {
  const digits = String(n)
  const groups = digits.padStart(Math.ceil(digits.length / 3) * 3, '0').match(/.{3}/g)
  const name = groups.map((group, i) => i < groups.length - 1 ? `x${group}` : group).join('/')
  return width < WIDTH ? `${name}.p/${width}` : name
}

// The newest checkpoint of a round's ledger.
export async function fetchCheckpoint (address, roundId, publicKey) {
  const note = await get(`${address}/v1/ledger/checkpoint`, NOTE_MAX_BYTES)
  demand(note, 'checkpoint_invalid', 'there is no checkpoint')
  return readCheckpoint(note.toString(), roundId, [publicKey])
}
