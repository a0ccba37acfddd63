// Which tokens a lease dictates, written from docs/protocol.md, "Sampling": the numbers are its steps.

const MASK = 2n ** 64n - 1n
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n]
const INCREMENTS = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn]
const ROUNDS = 10

// (1) Four words of 64 bits.
export function philox (key, counter) {
  let [k0, k1] = key.map(BigInt)
  let [c0, c1, c2, c3] = counter.map(BigInt)
  for (let round = 0; round < ROUNDS; round++) {
    const [a, b] = [MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2];
    [c0, c1, c2, c3] = [(b >> 64n) ^ c1 ^ k0, b & MASK, (a >> 64n) ^ c3 ^ k1, a & MASK]
    k0 = (k0 + INCREMENTS[0]) & MASK
    k1 = (k1 + INCREMENTS[1]) & MASK
  }
  return [c0, c1, c2, c3]
}

// (2) The uniform of one position of one sample.
export function uniform (seed, sample, position) {
  const words = philox([seed, sample], [Math.floor(position / 4) + 1, 0, 0, 0])
  return Number(words[position % 4] >> 11n) * 2 ** -53
}

function justBelow (value) {
  const bits = new DataView(new ArrayBuffer(8))
  bits.setFloat64(0, value)
  bits.setBigUint64(0, bits.getBigUint64(0) - 1n)
  return bits.getFloat64(0)
}

// (4) The token that a uniform picks out of weights that need not sum to one.
export function pick (weights, u) {
  const total = weights.reduce((sum, weight) => sum + weight, 0)
  const bound = u * total < total ? u * total : justBelow(total)
  let sum = 0
  return weights.findIndex((weight) => (sum += weight) > bound)
}

// (3) The token that a uniform draws at a temperature; at 0 the first of the likeliest.
function draw (logits, temperature, u) {
  const highest = logits.reduce((a, b) => Math.max(a, b))
  if (Number(temperature) === 0) return logits.indexOf(highest)
  return pick(logits.map((logit) => Math.exp((logit - highest) / temperature)), u)
}

// How likely a token is by logits, in nats.
export function logprob (logits, token) {
  const highest = logits.reduce((a, b) => Math.max(a, b))
  return logits[token] - highest - Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - highest), 0))
}

// One sample of a lease: { tokens, logprobs, finish }, without the tokens of its prefix, which take part in the count.
export function sample (model, { prompt, prefix, seed, index, temperature, own, maxNewTokens, turnTokensMax }) {
  const [tokens, logprobs] = [[], []]
  if (prefix.finish) return { tokens, logprobs, finish: prefix.finish }
  const state = model.begin()
  const begun = readU32(prefix.tokens)
  let logits
  for (const token of [...prompt, ...begun]) logits = model.step(state, token)
  const most = Math.min(maxNewTokens - begun.length, turnTokensMax || maxNewTokens)
  while (tokens.length < most) {
    const token = draw(logits, own, uniform(seed, index, begun.length + tokens.length))
    tokens.push(token)
    logprobs.push(Math.max(-104, logprob(logits.map((logit) => logit / temperature), token)))
    if (model.ends.includes(token)) return { tokens, logprobs, finish: 'stop' } // (5)
    if (tokens.length < most) logits = model.step(state, token)
  }
  return { tokens, logprobs, finish: 'length' }
}

export function u32 (numbers) {
  const out = Buffer.alloc(4 * numbers.length)
  numbers.forEach((number, i) => out.writeUInt32LE(number, 4 * i))
  return out
}

export function f32 (numbers) {
  const out = Buffer.alloc(4 * numbers.length)
  numbers.forEach((number, i) => out.writeFloatLE(number, 4 * i))
  return out
}

export const readU32 = (data) => Array.from({ length: data.length / 4 }, (_, i) => data.readUInt32LE(4 * i))
