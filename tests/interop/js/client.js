// A node and a reader of the ledger that are not ours: what it learns is one line of JSON each, a refusal the last.
//
//   node client.js version JOIN FOLDER        the trust metadata, then every chunk and file of the newest version
//   node client.js work JOIN FOLDER           the same, then a lease answered honestly, one wrongly, one given back
//   node client.js play JOIN FOLDER EPISODES  groups of episodes, one after the other, each to its last turn
//   node client.js why JOIN FOLDER            what became of this node's claims
//   node client.js ledger JOIN FOLDER         every entry against the checkpoint, and that against the last one seen
//   node client.js receipt JOIN FOLDER CLAIM  what the log has of a claim, by its receipt
//   node client.js forge JOIN FOLDER          requests that must be refused, and how they were
//
// FOLDER keeps the node's key and what was trusted; --now MS is another time than the clock's.

import { randomBytes } from 'node:crypto'
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { setTimeout } from 'node:timers/promises'
import { parseArgs } from 'node:util'
import { digest } from './blake3.js'
import { decode } from './canonical.js'
import { demand, Refused } from './errors.js'
import { NodeKey } from './keys.js'
import { fetchCheckpoint, Log, readCheckpoint } from './log.js'
import { Model } from './model.js'
import { Node } from './node.js'
import { readReceipt } from './receipt.js'
import { f32, logprob, readU32, sample, u32 } from './sampling.js'
import { ledgerKeyOf, Trust } from './trust.js'
import { fetchVersion, readManifest } from './version.js'
import { get } from './web.js'

const CANARY_NATS = 1e-3
const RETRY_MIN_S = 0.05
const RECEIPT_MAX_BYTES = 8 * 1024 * 1024

const say = (what) => console.log(JSON.stringify(what, (_, value) => typeof value === 'bigint' ? `${value}` : value))

// The bytes of a file, or what is made and kept where there is none.
function kept (file, make) {
  try {
    return readFileSync(file)
  } catch (error) {
    if (error.code !== 'ENOENT') throw error
    const made = make()
    if (made) writeFileSync(file, made, { mode: 0o600 })
    return made
  }
}

const nodeKey = (folder) => new NodeKey(kept(path.join(folder, 'node.key'), () => randomBytes(32)))

async function version (trust, folder) {
  const { version, manifest: data, roots } = await trust.refresh()
  demand(data, 'unreachable', 'no version was published yet')
  const manifest = readManifest(data, trust.roundId, version)
  const files = await fetchVersion(trust.address, manifest, path.join(folder, `version-${version}`))
  const digests = Object.fromEntries(manifest.files.map((file) => [file.path, file.digest]))
  say({ version, now_ms: trust.nowMs, roots: roots.length, manifest: digest(data), files: digests })
  return { manifest, files }
}

function answer (model, manifest, lease) {
  const prompt = readU32(lease.prompt)
  const { temperature, max_new_tokens: longest } = manifest.sampler
  const maxNewTokens = Math.min(longest, lease.tokens_max ?? longest)
  const { seed, turn_tokens_max: turnTokensMax, temperature: own = temperature } = lease
  const unbegun = { tokens: Buffer.alloc(0), finish: '' }
  return Array.from({ length: lease.samples }, (_, index) => {
    const prefix = lease.prefixes[index] ?? unbegun
    return sample(model, { prompt, prefix, seed, index, temperature, own, maxNewTokens, turnTokensMax })
  })
}

// How far the model is from what the publisher says of it, on the mean; 0 where he says nothing.
function canaryError (model, file) {
  if (!file) return 0
  const { tokens, logprobs } = JSON.parse(file)
  const state = model.begin()
  const errors = logprobs.map((said, i) => Math.abs(logprob(model.step(state, tokens[i]), tokens[i + 1]) - said))
  return errors.reduce((a, b) => a + b) / errors.length
}

const packed = ({ tokens, logprobs, finish }) => ({ tokens: u32(tokens), logprobs: f32(logprobs), finish })

// A registered node with the newest version's model.
async function introduced (trust, folder) {
  const { manifest, files } = await version(trust, folder)
  const node = new Node(trust.address, trust.roundId, nodeKey(folder))
  const registered = await node.register('js')
  const model = new Model(files)
  const strayed = canaryError(model, files['canary.json'])
  demand(strayed <= CANARY_NATS, 'engine_failed', `the canary is ${strayed} nats off`)
  const beat = await node.heartbeat(manifest.version, 'idle', ['heard', 'fetched', 'loaded'])
  say({ node: node.key.nodeId, canary_nats: strayed, registered, beat })
  return { manifest, node, model }
}

async function work (trust, folder) {
  const { manifest, node, model } = await introduced(trust, folder)
  const lease = async () => {
    const reply = await node.leases(manifest.version, 1)
    demand(reply.leases.length === 1, 'unknown_lease', `no work: ${reply.reason}`)
    return reply.leases[0]
  }
  const honest = await lease()
  const claim = node.claim(honest, answer(model, manifest, honest).map(packed))
  const [submitted, again] = [await node.submit(claim), await node.submit(claim)]
  say({ honest: digest(claim), lease: honest.lease_id, verdicts: [...submitted.verdicts, ...again.verdicts] })

  const second = await lease()
  const [first, ...others] = answer(model, manifest, second)
  const wrong = { ...first, tokens: first.tokens.with(0, model.config.vocab_size) }
  const { verdicts } = await node.submit(node.claim(second, [wrong, ...others].map(packed)))
  say({ wrong: second.lease_id, verdicts })

  const third = await lease()
  await node.giveBack(third.lease_id)
  say({ returned: third.lease_id })
  await why(trust, folder)
}

// The answer to a turn brings the next one, if the environment was quick; else it is asked for, while the coordinator
// says that there may be one.
async function play (trust, folder, episodes) {
  const { manifest, node, model } = await introduced(trust, folder)
  for (let number = 0; number < Number(episodes); number++) {
    let reply = await node.leases(manifest.version, 1)
    demand(reply.leases.length === 1, 'unknown_lease', `no work: ${reply.reason}`)
    while (reply.leases.length || reply.stays) {
      if (!reply.leases.length) {
        await setTimeout(1000 * Math.max(reply.retry_s, RETRY_MIN_S))
        reply = await node.leases(manifest.version, 1, true)
        continue
      }
      const turns = reply.leases.map((turn) => node.claim(turn, answer(model, manifest, turn).map(packed)))
      const { verdicts, leases } = await node.submit(...turns)
      say({ turns: turns.map(digest), begun: reply.leases.map((turn) => turn.prefixes.length > 0), verdicts })
      reply = { leases, stays: true, retry_s: 0 } // there may be a turn that this answer did not bring
    }
  }
  await why(trust, folder)
}

async function why (trust, folder) {
  const node = new Node(trust.address, trust.roundId, nodeKey(folder))
  for (const { lease_id: lease, claim_id: claim, state, code, finding } of await node.why()) {
    say({ lease, claim, state, code, finding })
  }
}

async function ledger (trust, folder) {
  const file = path.join(folder, 'checkpoint')
  const known = (await trust.refresh()).roots
  const checkpoint = await fetchCheckpoint(trust.address, trust.roundId, ledgerKeyOf(known.at(-1)))
  const { roots } = await trust.refresh() // after the checkpoint, so that none in the log is missing
  const log = new Log(trust.address, checkpoint)
  const last = kept(file, () => null)
  const older = last && readCheckpoint(last.toString(), trust.roundId, roots.map(ledgerKeyOf))
  if (older) await log.extend(older)
  const entries = (await log.entries()).map(decode)
  for (const index of entries.keys()) await log.entry(index)
  const named = entries.filter(({ kind }) => kind === 'root').map(({ root_digest: name }) => name)
  const served = roots.map((root) => digest(Buffer.from(root)))
  demand(`${named}` === `${served}`, 'untrusted_metadata', 'the log has other roots')
  writeFileSync(file, checkpoint.note)
  say({ size: log.size, continues: older?.size ?? null, entries })
}

async function receipt (trust, folder, claim) {
  const data = await get(`${trust.address}/v1/receipts/${claim}`, RECEIPT_MAX_BYTES)
  demand(data, 'not_found', 'there is no receipt of this claim yet')
  say({ entries: readReceipt(data, trust.roundId) })
}

async function forge (trust, folder) {
  const node = new Node(trust.address, trust.roundId, nodeKey(folder))
  await node.register('forger')
  const sealed = (body, changed) => node.request('/v1/versions', body, changed)
  const asked = { newer_than: 0 }
  const replayed = sealed(asked)
  await node.post('/v1/versions', replayed)
  const broken = Buffer.from(sealed(asked))
  broken[broken.indexOf(Buffer.from('\xa9signature', 'latin1')) + 20] ^= 1
  const stranger = new Node(trust.address, trust.roundId, new NodeKey(randomBytes(32)))
  const wide = Buffer.from('\x81\xaanewer_than\xd1\x00\x00', 'latin1') // a zero in 16 bits
  const tries = {
    broken,
    replayed,
    late: sealed(asked, { sent_ms: Date.now() - 3_600_000 }),
    elsewhere: node.request('/v1/leases', asked),
    trailing: Buffer.concat([sealed(asked), Buffer.of(0xc0)]),
    unknown: sealed({ ...asked, more: 1 }),
    wide: sealed(null, { body: wide }),
    stranger: stranger.request('/v1/versions', asked)
  }
  const attempts = Object.entries(tries).map(([name, data]) => [name, '/v1/versions', data])
  const whole = node.request('/v1/heartbeat', { ...node.beat(0, 'idle'), tokens_per_s: 0 })
  for (const [name, address, data] of [...attempts, ['whole', '/v1/heartbeat', whole]]) {
    try {
      say({ name, answered: await node.post(address, data) })
    } catch (error) {
      if (!(error instanceof Refused)) throw error
      say({ name, code: error.code, status: error.detail.status })
    }
  }
}

const commands = { version, work, play, why, ledger, receipt, forge }
const { positionals: [command, joinString, folder, ...rest], values } = parseArgs({
  allowPositionals: true,
  options: { now: { type: 'string' } }
})
try {
  mkdirSync(folder, { recursive: true })
  await commands[command](new Trust(joinString, folder, Number(values.now ?? Date.now())), folder, ...rest)
} catch (error) {
  if (!(error instanceof Refused)) throw error
  say({ refused: error.code, message: error.message })
  process.exitCode = 1
}
