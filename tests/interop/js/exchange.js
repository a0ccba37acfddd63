// `/echo-swarm/chunks/1`, written from docs/protocol.md, section 14: both sides of one stream.
//
// - A chunk is handed out only if it hashes to its name.
// - Whatever departs from the protocol throws; the caller then aborts the stream.
// - A length is judged at the header, so a peer cannot make us keep more than one largest frame.

import { blake3 } from '@noble/hashes/blake3.js'
import { bytesToHex, hexToBytes } from '@noble/hashes/utils.js'
import { Uint8ArrayList } from 'uint8arraylist'

export const PROTOCOL = '/echo-swarm/chunks/1'
export const WANTS_MAX = 32

const HAVE = 1
const WANT = 2
const CHUNK = 3
const REJECT = 4
const CANCEL = 5
const BYE = 6

const REJECTED = { 1: 'absent', 2: 'busy', 3: 'cancelled' }
const FAREWELL = { 1: 'done', 2: 'busy', 3: 'idle', 4: 'fault' }
const DONE = Uint8Array.of(1)
const ABSENT = Uint8Array.of(1)
const IN_STEP = Uint8Array.of(0)

const HEADER_BYTES = 5
const NAME_BYTES = 32
const HAVE_NAMES_MAX = 64
const CHUNK_MAX_BYTES = 4 * 1024 * 1024

// Type → smallest and largest body.
const BODY_BYTES = {
  [HAVE]: [NAME_BYTES, HAVE_NAMES_MAX * NAME_BYTES],
  [WANT]: [NAME_BYTES + 1, NAME_BYTES + 1],
  [CHUNK]: [NAME_BYTES + 1, NAME_BYTES + CHUNK_MAX_BYTES],
  [REJECT]: [NAME_BYTES + 1, NAME_BYTES + 1],
  [CANCEL]: [NAME_BYTES, NAME_BYTES],
  [BYE]: [1, 1]
}

function frame (type, ...parts) {
  const body = new Uint8ArrayList(...parts)
  const header = new DataView(new ArrayBuffer(HEADER_BYTES))
  header.setUint8(0, type)
  header.setUint32(1, body.byteLength)
  body.prepend(new Uint8Array(header.buffer))
  return body
}

// Write a frame, and wait while the peer has no room for more.
async function send (stream, ...framed) {
  if (!stream.send(frame(...framed))) await stream.onDrain()
}

// The frames that arrive until the peer ends the stream: { type, body }.
async function * frames (stream) {
  const unread = new Uint8ArrayList()
  for await (const piece of stream) {
    unread.append(piece)
    while (unread.byteLength >= HEADER_BYTES) {
      const [type, length] = [unread.get(0), unread.getUint32(1)]
      const [smallest, largest] = BODY_BYTES[type] ?? [1, 0]
      if (length < smallest || length > largest) throw new Error(`a frame of type ${type} with ${length} bytes`)
      if (unread.byteLength < HEADER_BYTES + length) break
      unread.consume(HEADER_BYTES)
      yield { type, body: unread.slice(0, length) }
      unread.consume(length)
    }
  }
}

const nameIn = (body) => bytesToHex(body.subarray(0, NAME_BYTES))

// The asking side: `want` as often as you like, `bye` at the end, while `run` takes the answers in.
export class Requester {
  told = new Set() // what the responder says it has
  #stream
  #open = new Map() // name → the promise of its answer

  constructor (stream) {
    this.#stream = stream
  }

  // The chunk, or why there is none: { data } or { rejected }.
  async want (name) {
    if (this.#open.size >= WANTS_MAX || this.#open.has(name)) throw new Error('beyond the window, or asked already')
    const answer = Promise.withResolvers()
    this.#open.set(name, answer)
    await send(this.#stream, WANT, hexToBytes(name), IN_STEP)
    return await answer.promise
  }

  // Take a WANT back; it still gets its answer.
  async cancel (name) {
    if (this.#open.has(name)) await send(this.#stream, CANCEL, hexToBytes(name))
  }

  async bye () {
    await send(this.#stream, BYE, DONE)
    await this.#stream.close()
  }

  // Until the responder leaves; why it did.
  async run () {
    let cause = new Error('the exchange has ended')
    try {
      for await (const { type, body } of frames(this.#stream)) {
        if (type === BYE) return FAREWELL[body[0]]
        if (type === HAVE) this.#note(body)
        else this.#answer(type, body)
      }
      return 'without a word'
    } catch (error) {
      cause = error
      throw error
    } finally {
      for (const { reject } of this.#open.values()) reject(cause)
    }
  }

  #note (body) {
    for (let at = 0; at < body.length; at += NAME_BYTES) this.told.add(nameIn(body.subarray(at)))
  }

  #answer (type, body) {
    const name = nameIn(body)
    const rest = body.subarray(NAME_BYTES)
    const open = this.#open.get(name)
    if (open === undefined || (type !== CHUNK && type !== REJECT)) throw new Error(`nobody asked for ${name}`)
    if (type === CHUNK && bytesToHex(blake3(rest)) !== name) throw new Error(`wrong bytes for ${name}`)
    this.#open.delete(name)
    open.resolve(type === CHUNK ? { data: rest } : { rejected: REJECTED[rest[0]] })
  }
}

// The answering side: `chunks` maps names to bytes. It never waits, so every CANCEL comes too late.
export async function respond (stream, chunks) {
  const names = [...chunks.keys()].map(hexToBytes)
  while (names.length > 0) await send(stream, HAVE, ...names.splice(0, HAVE_NAMES_MAX))
  for await (const { type, body } of frames(stream)) {
    if (type === BYE) break
    if (type !== WANT && type !== CANCEL) throw new Error(`a requester sent a frame of type ${type}`)
    if (type === CANCEL) continue
    const data = chunks.get(nameIn(body))
    const name = body.slice(0, NAME_BYTES) // whether somebody is behind changes nothing here
    await (data ? send(stream, CHUNK, name, data) : send(stream, REJECT, name, ABSENT))
  }
  await send(stream, BYE, DONE)
  await stream.close()
}
