// BLAKE3 as its specification has it: the hash of 32 bytes, plain or with a key. Browsers have none of their own.

const IV = Uint32Array.of(
  0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
);
const ORDER = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
const [CHUNK_START, CHUNK_END, PARENT, ROOT, KEYED] = [1, 2, 4, 8, 16];
const [BLOCK_BYTES, CHUNK_BYTES] = [64, 1024];

// The place of the message word of each step in each of the seven rounds.
const SCHEDULE = [Array.from({ length: 16 }, (_, place) => place)];
while (SCHEDULE.length < 7) SCHEDULE.push(ORDER.map((place) => SCHEDULE.at(-1)[place]));

const turn = (word, bits) => (word >>> bits) | (word << (32 - bits));

function mix(v, a, b, c, d, x, y) {
  v[a] += v[b] + x;
  v[d] = turn(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = turn(v[b] ^ v[c], 12);
  v[a] += v[b] + y;
  v[d] = turn(v[d] ^ v[a], 8);
  v[c] += v[d];
  v[b] = turn(v[b] ^ v[c], 7);
}

function compress(chaining, words, counter, length, flags) {
  const v = new Uint32Array(16);
  v.set(chaining);
  v.set(IV.subarray(0, 4), 8);
  v.set([counter, counter / 2 ** 32, length, flags], 12);
  for (const s of SCHEDULE) {
    mix(v, 0, 4, 8, 12, words[s[0]], words[s[1]]);
    mix(v, 1, 5, 9, 13, words[s[2]], words[s[3]]);
    mix(v, 2, 6, 10, 14, words[s[4]], words[s[5]]);
    mix(v, 3, 7, 11, 15, words[s[6]], words[s[7]]);
    mix(v, 0, 5, 10, 15, words[s[8]], words[s[9]]);
    mix(v, 1, 6, 11, 12, words[s[10]], words[s[11]]);
    mix(v, 2, 7, 8, 13, words[s[12]], words[s[13]]);
    mix(v, 3, 4, 9, 14, words[s[14]], words[s[15]]);
  }
  return v.subarray(0, 8).map((word, place) => word ^ v[place + 8]);
}

function wordsOf(bytes, count) {
  const padded = new Uint8Array(4 * count);
  padded.set(bytes);
  const view = new DataView(padded.buffer);
  return Uint32Array.from({ length: count }, (_, place) => view.getUint32(4 * place, true));
}

function chunk(data, counter, { start, flags }, end) {
  let chaining = start;
  const last = Math.max(0, Math.ceil(data.length / BLOCK_BYTES) - 1);
  for (let number = 0; number <= last; number++) {
    const block = data.subarray(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES);
    const place = (number === 0 ? CHUNK_START : 0) | (number === last ? CHUNK_END | end : 0);
    chaining = compress(chaining, wordsOf(block, 16), counter, block.length, flags | place);
  }
  return chaining;
}

function subtree(data, counter, mode, end) {
  if (data.length <= CHUNK_BYTES) return chunk(data, counter, mode, end);
  const left = 2 ** Math.floor(Math.log2(Math.ceil(data.length / CHUNK_BYTES) - 1));
  const words = new Uint32Array(16);
  words.set(subtree(data.subarray(0, left * CHUNK_BYTES), counter, mode, 0));
  words.set(subtree(data.subarray(left * CHUNK_BYTES), counter + left, mode, 0), 8);
  return compress(mode.start, words, 0, BLOCK_BYTES, mode.flags | PARENT | end);
}

/** Returns the 32 bytes of the hash of `data`; `key` has 32 bytes. */
export function blake3(data, key = null) {
  const mode = key ? { start: wordsOf(key, 8), flags: KEYED } : { start: IV, flags: 0 };
  const out = new DataView(new ArrayBuffer(32));
  subtree(data, 0, mode, ROOT).forEach((word, place) => out.setUint32(4 * place, word, true));
  return new Uint8Array(out.buffer);
}
