// Canonical MessagePack, written from docs/protocol.md, section 1: equal values have equal bytes.
//
// - An integer is a number, or a BigInt where a number would lose bits; a float is a `Float`, even a whole one.
// - `decode` encodes what it built again, so whatever is not the one encoding of its value is refused.

import { demand, Refused } from './errors.js'

const MESSAGE_MAX_BYTES = 8 * 1024 * 1024
const LEVELS_MAX = 8
const VALUES_MAX = 100_000
const TEXT_MAX_BYTES = 4096

// A float64; JSON and arithmetic take it for its value.
export class Float extends Number {}

const u8 = (...bytes) => Buffer.from(bytes)

function sized (head, size, byteCount) {
  const out = Buffer.alloc(1 + byteCount, head)
  out.writeUIntBE(size, 1, byteCount)
  return out
}

// The header of something with a length: the widest small form's limit and head, then 8, 16 and 32 bits.
function header (size, small, smallMax, head8, head16, head32) {
  if (size <= smallMax) return u8(small | size)
  if (head8 !== null && size < 2 ** 8) return sized(head8, size, 1)
  return size < 2 ** 16 ? sized(head16, size, 2) : sized(head32, size, 4)
}

function integer (value) {
  const big = BigInt(value)
  demand(big >= -(2n ** 63n) && big < 2n ** 64n, 'malformed_message', `${big} is no integer of a message`)
  if (big >= -32n && big < 128n) return u8(Number(big) & 0xff)
  const bytes = [1, 2, 4, 8].find((n) => {
    const bits = BigInt(8 * n)
    return big >= 0n ? big < 2n ** bits : big >= -(2n ** (bits - 1n))
  })
  const out = Buffer.alloc(9)
  out.writeBigUInt64BE(BigInt.asUintN(64, big), 1)
  const head = { 1: 0, 2: 1, 4: 2, 8: 3 }[bytes] + (big >= 0n ? 0xcc : 0xd0)
  return Buffer.concat([u8(head), out.subarray(9 - bytes)])
}

function float (value) {
  demand(Number.isFinite(Number(value)), 'non_finite_number', 'a NaN or an infinity')
  const out = Buffer.alloc(9, 0xcb)
  out.writeDoubleBE(Number(value), 1)
  return out
}

function text (value) {
  const data = Buffer.from(value, 'utf8')
  return [header(data.length, 0xa0, 31, 0xd9, 0xda, 0xdb), data]
}

function map (value) {
  const entries = Object.entries(value).map(([key, held]) => [Buffer.from(key), key, held])
  entries.sort(([a], [b]) => Buffer.compare(a, b))
  const head = header(entries.length, 0x80, 15, null, 0xde, 0xdf)
  return [head, ...entries.flatMap(([, key, held]) => [...text(key), ...parts(held)])]
}

function parts (value) {
  if (value === null) return [u8(0xc0)]
  if (typeof value === 'boolean') return [u8(value ? 0xc3 : 0xc2)]
  if (typeof value === 'bigint' || Number.isSafeInteger(value)) return [integer(value)]
  if (value instanceof Float) return [float(value)]
  if (typeof value === 'string') return text(value)
  if (value instanceof Uint8Array) return [header(value.length, 0, -1, 0xc4, 0xc5, 0xc6), value]
  if (Array.isArray(value)) return [header(value.length, 0x90, 15, null, 0xdc, 0xdd), ...value.flatMap(parts)]
  if (typeof value === 'object') return map(value)
  throw new TypeError(`no message has a ${typeof value}`)
}

export const encode = (value) => Buffer.concat(parts(value))

class Reader {
  #at = 0
  #values = 0

  constructor (data) {
    this.data = data
  }

  get ended () {
    return this.#at === this.data.length
  }

  value (level = 1) {
    demand(++this.#values <= VALUES_MAX, 'message_too_large', 'too many values')
    const head = this.#number(1)
    if (head < 0x80) return head
    if (head < 0x90) return this.#map(head & 0x0f, level)
    if (head < 0xa0) return this.#array(head & 0x0f, level)
    if (head < 0xc0) return this.#text(head & 0x1f)
    if (head >= 0xe0) return head - 0x100
    switch (head) {
      case 0xc0: return null
      case 0xc2: return false
      case 0xc3: return true
      case 0xc4: case 0xc5: case 0xc6: return this.#take(this.#number(2 ** (head - 0xc4)))
      case 0xcb: return new Float(this.#take(8).readDoubleBE())
      case 0xcc: case 0xcd: case 0xce: return this.#number(2 ** (head - 0xcc))
      case 0xcf: return plain(this.#take(8).readBigUInt64BE())
      case 0xd0: case 0xd1: case 0xd2: return this.#take(2 ** (head - 0xd0)).readIntBE(0, 2 ** (head - 0xd0))
      case 0xd3: return plain(this.#take(8).readBigInt64BE())
      case 0xd9: case 0xda: case 0xdb: return this.#text(this.#number(2 ** (head - 0xd9)))
      case 0xdc: case 0xdd: return this.#array(this.#number(2 ** (head - 0xdb)), level)
      case 0xde: case 0xdf: return this.#map(this.#number(2 ** (head - 0xdd)), level)
    }
    throw new Refused('malformed_message', `a value of kind ${head.toString(16)}`)
  }

  #take (size) {
    demand(this.#at + size <= this.data.length, 'malformed_message', 'the message ends too soon')
    return this.data.subarray(this.#at, this.#at += size)
  }

  #number (bytes) {
    return this.#take(bytes).readUIntBE(0, bytes)
  }

  #text (size) {
    demand(size <= TEXT_MAX_BYTES, 'message_too_large', 'a text is too long')
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(this.#take(size))
  }

  #array (size, level) {
    this.#room(size, level)
    return Array.from({ length: size }, () => this.value(level + 1))
  }

  #map (size, level) {
    this.#room(2 * size, level)
    return Object.fromEntries(Array.from({ length: size }, () => [this.value(level + 1), this.value(level + 1)]))
  }

  #room (size, level) {
    demand(level <= LEVELS_MAX, 'message_too_large', 'too many levels')
    demand(this.#values + size <= VALUES_MAX, 'message_too_large', 'too many values')
  }
}

const plain = (big) => Number.isSafeInteger(Number(big)) ? Number(big) : big

export function decode (data) {
  demand(data.length <= MESSAGE_MAX_BYTES, 'message_too_large', `${data.length} bytes`)
  const reader = new Reader(Buffer.from(data))
  const value = reader.value()
  demand(reader.ended, 'malformed_message', 'something follows the message')
  demand(encode(value).equals(reader.data), 'not_canonical', 'not the one encoding of what it means')
  return value
}

// A message with exactly these fields.
export function message (data, ...names) {
  return fields(decode(data), ...names)
}

export function fields (value, ...names) {
  const found = value !== null && typeof value === 'object' ? Object.keys(value).sort().join() : typeof value
  demand(found === names.toSorted().join(), 'malformed_message', `${found} where ${names} should be`)
  return value
}
