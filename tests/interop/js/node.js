// What a node says to the coordinator, written from docs/protocol.md, section 5: signed requests, plain answers.

import { randomBytes } from 'node:crypto'
import { digest } from './blake3.js'
import { decode, encode, fields, Float } from './canonical.js'
import { Refused } from './errors.js'

const GENERATION = 8
const PATIENCE_MS = 30_000

const HEARTBEAT_REPLY = ['newest_version', 'heartbeat_s', 'finished']
const LEASE_REPLY = ['leases', 'newest_version', 'reason', 'retry_s', 'stays']
const LEASE = [
  'lease_id', 'version', 'seed', 'samples', 'prompt', 'price_micros_per_mtok', 'expires_ms', 'judged_as', 'prefixes',
  'turn_tokens_max', 'context_tokens_paid'
]
const VERDICT = ['lease_id', 'outcome', 'code', 'message', 'tokens', 'credit_micros', 'evidence']
const EVIDENCE = [
  'code', 'step', 'claim_id', 'field', 'expected', 'observed', 'tolerance', 'positions', 'validator', 'command'
]
const EXPLANATION = [
  'lease_id', 'claim_id', 'state', 'code', 'said', 'finding', 'appeal', 'ruling', 'report', 'lease', 'rollout',
  'fragments'
]

// Fields that a lease has only where it differs from its manifest, or where somebody reads along.
const OPTIONAL = ['temperature', 'tokens_max', 'report_every_ms']
const leaseFields = (lease) => fields(lease, ...LEASE, ...OPTIONAL.filter((name) => name in lease))

export class Node {
  #session = randomBytes(8).toString('hex')

  constructor (address, roundId, key) {
    Object.assign(this, { address, roundId, key })
  }

  // A request as it goes over the wire; `changed` replaces fields, for those who try.
  request (path, body, changed = {}) {
    const made = { round_id: this.roundId, path, nonce: randomBytes(16), sent_ms: Date.now(), body: encode(body) }
    return this.key.seal('request', encode({ ...made, ...changed }))
  }

  async post (path, data) {
    const answer = await fetch(this.address + path, {
      method: 'POST', body: data, redirect: 'error', signal: AbortSignal.timeout(PATIENCE_MS)
    })
    const said = decode(Buffer.from(await answer.arrayBuffer()))
    if (!answer.ok) throw new Refused(said.code, said.message, { ...said, status: answer.status })
    return said
  }

  async #call (path, body, ...names) {
    return fields(await this.post(path, this.request(path, body)), ...names)
  }

  register (name) {
    return this.#call('/v1/nodes', {
      name,
      price_micros_per_mtok: 1_000_000,
      addresses: [],
      shares: false,
      agent: 'echo-swarm-js/1',
      generation: GENERATION,
      delegation: null
    }, ...HEARTBEAT_REPLY)
  }

  beat (version, phase, reached = []) {
    return {
      session: this.#session,
      version,
      phase,
      tokens_per_s: new Float(0),
      transfer: { from_peers: 0, from_seeder: 0, from_http: 0, to_peers: 0 },
      blames: [],
      reached: reached.map((stage) => ({ version, stage, ago_s: new Float(0) }))
    }
  }

  heartbeat (...said) {
    return this.#call('/v1/heartbeat', this.beat(...said), ...HEARTBEAT_REPLY)
  }

  // With `finishing` it gets no more groups of this version, only the next turns of its episodes.
  async leases (version, groups, finishing = false) {
    const asked = { version, groups, continues: true, finishing, numerics: 'js/float64/cpu' }
    const reply = await this.#call('/v1/leases', asked, ...LEASE_REPLY)
    reply.leases.forEach(leaseFields)
    return reply
  }

  giveBack (...leaseIds) {
    return this.#call('/v1/leases/return', { lease_ids: leaseIds }, ...HEARTBEAT_REPLY)
  }

  // The signed answer to a lease; its payload's digest is the claim's id.
  claim (lease, samples) {
    const lease_digest = digest(encode(lease))
    return encode({ round_id: this.roundId, lease_id: lease.lease_id, lease_digest, samples })
  }

  // The verdicts, and the leases of next turns: this node's to answer or to give back.
  async submit (...claims) {
    const rollouts = claims.map((claim) => this.key.seal('rollout', claim))
    const { verdicts, leases } = await this.#call('/v1/rollouts', { rollouts }, 'verdicts', 'leases')
    leases.forEach(leaseFields)
    for (const verdict of verdicts) {
      fields(verdict, ...VERDICT)
      if (verdict.evidence) fields(verdict.evidence, ...EVIDENCE)
    }
    return { verdicts, leases }
  }

  async why (about = '') {
    const { explanations } = await this.#call('/v1/verdicts', { about }, 'tolerance', 'tolerances', 'explanations')
    return explanations.map((explanation) => fields(explanation, ...EXPLANATION))
  }
}
