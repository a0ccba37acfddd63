// BLAKE3 as https://github.com/BLAKE3-team/BLAKE3-specs has it: the plain hash of 32 bytes, since Node has none.

const IV = Uint32Array.of(
  0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19
)
const ORDER = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
const [CHUNK_START, CHUNK_END, PARENT, ROOT] = [1, 2, 4, 8]
const [BLOCK_BYTES, CHUNK_BYTES] = [64, 1024]

// Where the message word of each step of each of the seven rounds stands.
const SCHEDULE = [Array.from({ length: 16 }, (_, i) => i)]
while (SCHEDULE.length < 7) SCHEDULE.push(ORDER.map((i) => SCHEDULE.at(-1)[i]))

const turn = (word, bits) => (word >>> bits) | (word << (32 - bits))

function mix (v, a, b, c, d, x, y) {
  v[a] += v[b] + x
  v[d] = turn(v[d] ^ v[a], 16)
  v[c] += v[d]
  v[b] = turn(v[b] ^ v[c], 12)
  v[a] += v[b] + y
  v[d] = turn(v[d] ^ v[a], 8)
  v[c] += v[d]
  v[b] = turn(v[b] ^ v[c], 7)
}

function compress (chaining, words, counter, length, flags) {
  const v = new Uint32Array(16)
  v.set(chaining)
  v.set(IV.subarray(0, 4), 8)
  v.set([counter, counter / 2 ** 32, length, flags], 12)
  for (const s of SCHEDULE) {
    mix(v, 0, 4, 8, 12, words[s[0]], words[s[1]])
    mix(v, 1, 5, 9, 13, words[s[2]], words[s[3]])
    mix(v, 2, 6, 10, 14, words[s[4]], words[s[5]])
    mix(v, 3, 7, 11, 15, words[s[6]], words[s[7]])
    mix(v, 0, 5, 10, 15, words[s[8]], words[s[9]])
    mix(v, 1, 6, 11, 12, words[s[10]], words[s[11]])
    mix(v, 2, 7, 8, 13, words[s[12]], words[s[13]])
    mix(v, 3, 4, 9, 14, words[s[14]], words[s[15]])
  }
  return v.subarray(0, 8).map((word, i) => word ^ v[i + 8])
}

function wordsOf (block) {
  const padded = Buffer.alloc(BLOCK_BYTES)
  padded.set(block)
  return Uint32Array.from({ length: 16 }, (_, i) => padded.readUInt32LE(4 * i))
}

function chunk (data, counter, end) {
  let chaining = IV
  const last = Math.max(0, Math.ceil(data.length / BLOCK_BYTES) - 1)
  for (let i = 0; i <= last; i++) {
    const block = data.subarray(i * BLOCK_BYTES, (i + 1) * BLOCK_BYTES)
    const flags = (i === 0 ? CHUNK_START : 0) | (i === last ? CHUNK_END | end : 0)
    chaining = compress(chaining, wordsOf(block), counter, block.length, flags)
  }
  return chaining
}

function tree (data, counter, end) {
  if (data.length <= CHUNK_BYTES) return chunk(data, counter, end)
  const chunks = Math.ceil(data.length / CHUNK_BYTES)
  const left = 2 ** Math.floor(Math.log2(chunks - 1))
  const words = new Uint32Array(16)
  words.set(tree(data.subarray(0, left * CHUNK_BYTES), counter, 0))
  words.set(tree(data.subarray(left * CHUNK_BYTES), counter + left, 0), 8)
  return compress(IV, words, 0, BLOCK_BYTES, PARENT | end)
}

// The digest of bytes, as 64 hex digits.
export function digest (data) {
  const out = Buffer.alloc(32)
  tree(data, 0, ROOT).forEach((word, i) => out.writeUInt32LE(word, 4 * i))
  return out.toString('hex')
}
