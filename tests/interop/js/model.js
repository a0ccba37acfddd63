// A Qwen3 of the hub's format, token by token on the CPU: weights as published, sums in float64.

// Type → the bits of an element as a float32.
const READ = {
  F32: (data, i) => data.readUInt32LE(4 * i),
  BF16: (data, i) => data.readUInt16LE(2 * i) * 2 ** 16
}

function readTensors (data) {
  const start = 8 + Number(data.readBigUInt64LE())
  const tensors = {}
  const { __metadata__: _, ...described } = JSON.parse(data.subarray(8, start))
  for (const [name, { dtype, shape, data_offsets: ends }] of Object.entries(described)) {
    const read = READ[dtype]
    if (!read) throw new Error(`weights of type ${dtype}`)
    const [from, to] = ends.map((end) => start + end)
    const bits = Uint32Array.from({ length: shape.reduce((a, b) => a * b) }, (_, i) => read(data.subarray(from, to), i))
    tensors[name] = { values: new Float32Array(bits.buffer), columns: shape.at(-1) }
  }
  return tensors
}

function times ({ values, columns }, x) {
  const out = new Float64Array(values.length / columns)
  for (let row = 0; row < out.length; row++) {
    let sum = 0
    for (let i = 0; i < columns; i++) sum += values[row * columns + i] * x[i]
    out[row] = sum
  }
  return out
}

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0)

const add = (a, b) => a.map((value, i) => value + b[i])

function softmax (scores) {
  const highest = Math.max(...scores)
  const weights = scores.map((score) => Math.exp(score - highest))
  const total = weights.reduce((a, b) => a + b)
  return weights.map((weight) => weight / total)
}

export class Model {
  // From a version's files.
  constructor (files) {
    this.config = JSON.parse(files['config.json'])
    if (this.config.model_type !== 'qwen3') throw new Error(`a model of type ${this.config.model_type}`)
    const { eos_token_id: ends } = JSON.parse(files['generation_config.json'])
    this.ends = [ends].flat()
    this.tensors = readTensors(files['model.safetensors'])
    this.theta = this.config.rope_theta ?? this.config.rope_parameters.rope_theta
  }

  // A sequence without tokens.
  begin () {
    const layers = Array.from({ length: this.config.num_hidden_layers }, () => ({ keys: [], values: [] }))
    return { position: 0, layers }
  }

  // The logits after one more token.
  step (state, token) {
    const embeddings = this.tensors['model.embed_tokens.weight']
    const { columns } = embeddings
    let hidden = Float64Array.from(embeddings.values.subarray(token * columns, (token + 1) * columns))
    state.layers.forEach((layer, n) => {
      const part = (name) => this.tensors[`model.layers.${n}.${name}.weight`]
      hidden = add(hidden, this.#attend(part, layer, state.position, this.#norm(hidden, part('input_layernorm'))))
      const x = this.#norm(hidden, part('post_attention_layernorm'))
      const up = times(part('mlp.up_proj'), x)
      const gated = times(part('mlp.gate_proj'), x).map((value, i) => value / (1 + Math.exp(-value)) * up[i])
      hidden = add(hidden, times(part('mlp.down_proj'), gated))
    })
    state.position++
    return times(this.tensors['lm_head.weight'] ?? embeddings, this.#norm(hidden, this.tensors['model.norm.weight']))
  }

  #norm (x, { values }) {
    const mean = x.reduce((sum, value) => sum + value * value, 0) / x.length
    const scale = 1 / Math.sqrt(mean + this.config.rms_norm_eps)
    return x.map((value, i) => value * scale * values[i])
  }

  #attend (part, layer, position, x) {
    const { num_attention_heads: heads, num_key_value_heads: groups, head_dim: size } = this.config
    const split = (name, norm) => {
      const all = times(part(`self_attn.${name}`), x)
      const each = Array.from({ length: all.length / size }, (_, i) => all.subarray(i * size, (i + 1) * size))
      return norm ? each.map((one) => this.#turn(this.#norm(one, part(`self_attn.${norm}`)), position)) : each
    }
    const queries = split('q_proj', 'q_norm')
    layer.keys.push(split('k_proj', 'k_norm'))
    layer.values.push(split('v_proj'))
    const mixed = queries.flatMap((query, head) => {
      const group = Math.floor(head * groups / heads)
      const weights = softmax(layer.keys.map((keys) => dot(keys[group], query) / Math.sqrt(size)))
      return Array.from(query, (_, i) => dot(weights, layer.values.map((values) => values[group][i])))
    })
    return times(part('self_attn.o_proj'), mixed)
  }

  // Rotary positions, halves against each other.
  #turn (x, position) {
    const half = x.length / 2
    return x.map((value, i) => {
      const angle = position * this.theta ** (-2 * (i % half) / x.length)
      const other = i < half ? -x[i + half] : x[i - half]
      return value * Math.cos(angle) + other * Math.sin(angle)
    })
  }
}
