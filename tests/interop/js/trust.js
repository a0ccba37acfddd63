// From a join string to the newest manifest, written from docs/protocol.md, section 3: the numbers are its steps.
//
// - The state is a file, written after the last step, so that who fails has learned nothing.
// - Time is an argument.

import { createHash } from 'node:crypto'
import { readFileSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { demand, Refused } from './errors.js'
import { signedBy } from './keys.js'
import { get } from './web.js'

const ROOTS_MAX = 256
const DOCUMENT_MAX_BYTES = 256 * 1024
const MANIFEST = /^policy-(\d{12})\.manifest$/

export const sha256 = (data) => createHash('sha256').update(data).digest('hex')

// `http://host:port#<64 hex digits>` → where the coordinator is, and the round id.
export function readJoinString (joinString) {
  const [, address, roundId] = /^(http:\/\/[^/#]+)#([0-9a-f]{64})$/.exec(joinString) ?? []
  demand(address, 'untrusted_root', 'no join string of the form http://host:port#<64 hex digits>')
  return { address, roundId }
}

// OLPC canonical JSON, which TUF signs.
function canonicalJson (value) {
  if (typeof value === 'string') return `"${value.replace(/[\\"]/g, '\\$&')}"`
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join()}]`
  if (value === null || typeof value !== 'object') return JSON.stringify(value)
  return `{${Object.keys(value).sort().map((key) => `${canonicalJson(key)}:${canonicalJson(value[key])}`).join()}}`
}

function parsed (data) {
  try {
    return JSON.parse(data)
  } catch {
    throw new Refused('untrusted_metadata', 'a document that is no JSON')
  }
}

// The signed part of a document that enough of a role's keys have signed; each key counts once.
function verified (data, root, role) {
  const { signatures, signed } = parsed(data)
  const bytes = Buffer.from(canonicalJson(signed))
  const { keyids, threshold } = root.roles[role]
  const good = new Set()
  for (const { keyid, sig } of signatures) {
    const key = keyids.includes(keyid) ? root.keys[keyid] : undefined
    if (key?.scheme !== 'ed25519') continue
    if (signedBy(Buffer.from(key.keyval.public, 'hex'), bytes, Buffer.from(sig, 'hex'))) good.add(keyid)
  }
  demand(signed._type === role, 'untrusted_metadata', `a ${signed._type} where ${role} should be`)
  demand(threshold >= 1 && good.size >= threshold, 'untrusted_metadata', `too few of ${role}'s keys have signed it`)
  return signed
}

// Demands that root documents are a round's chain: the first is the pinned one, each has signed the next.
export function checkRoots (roots, roundId) {
  demand(sha256(roots[0]) === roundId, 'untrusted_root', 'not the root that the join string names')
  const signed = roots.map((root) => parsed(root).signed)
  roots.forEach((root, i) => {
    verified(root, signed[Math.max(0, i - 1)], 'root')
    verified(root, signed[i], 'root')
    demand(signed[i].version === i + 1, 'untrusted_metadata', 'a root of another number')
  })
}

export class Trust {
  #file
  #seen = { roots: [], timestamp: null, snapshot: null, targets: null }

  constructor (joinString, folder, nowMs) {
    Object.assign(this, readJoinString(joinString))
    this.nowMs = nowMs
    this.#file = path.join(folder, 'trust.json')
    try {
      this.#seen = JSON.parse(readFileSync(this.#file))
    } catch (error) {
      if (error.code !== 'ENOENT') throw error
    }
  }

  // Every step anew; the manifest's bytes and what the root says.
  async refresh () {
    const roots = await this.#roots() // (1)
    const root = JSON.parse(roots.at(-1)).signed
    this.#fresh(root)
    const timestamp = await this.#document('timestamp.json', root, 'timestamp') // (2)
    const stored = (role) => this.#stored(root, role)
    demand(timestamp.signed.version >= (stored('timestamp')?.version ?? 0), 'rolled_back', 'an older timestamp')
    const snapshot = await this.#named(timestamp.signed.meta['snapshot.json'], root, 'snapshot') // (3)
    demand(snapshot.signed.version >= (stored('snapshot')?.version ?? 0), 'rolled_back', 'an older snapshot')
    for (const [name, { version }] of Object.entries(stored('snapshot')?.meta ?? {})) {
      demand(snapshot.signed.meta[name]?.version >= version, 'rolled_back', `${name} went backwards`)
    }
    const targets = await this.#named(snapshot.signed.meta['targets.json'], root, 'targets') // (4)
    const version = newest(targets.signed)
    demand(version >= newest(stored('targets')), 'rolled_back', `version ${version} is older than one seen`) // (5)
    const manifest = version > 0 ? await this.#manifest(targets.signed, version) : null // (6)
    this.#seen = { roots, timestamp: timestamp.text, snapshot: snapshot.text, targets: targets.text }
    writeFileSync(this.#file, JSON.stringify(this.#seen))
    return { version, manifest, roots }
  }

  async #roots () {
    const roots = [...this.#seen.roots]
    while (roots.length <= ROOTS_MAX) {
      const next = await this.#get(`${roots.length + 1}.root.json`)
      if (next === null && roots.length > 0) return roots
      demand(next, 'not_found', 'there is no root')
      roots.push(next.toString())
      checkRoots(roots, this.roundId)
    }
    throw new Refused('untrusted_metadata', 'too many rotations')
  }

  // What was seen last of a role, as long as keys that still count have signed it.
  #stored (root, role) {
    try {
      return this.#seen[role] && verified(this.#seen[role], root, role)
    } catch {
      return null
    }
  }

  // The document of a role by the version and hash that the one above it names.
  async #named ({ version, hashes }, root, role) {
    const document = await this.#document(`${version}.${role}.json`, root, role, hashes.sha256)
    demand(document.signed.version === version, 'untrusted_metadata', `${role} has another version`)
    return document
  }

  async #document (name, root, role, hash = null) {
    const data = await this.#get(name)
    demand(data, 'not_found', `there is no ${name}`)
    demand(hash === null || sha256(data) === hash, 'untrusted_metadata', `${name} has another hash`)
    const signed = verified(data, root, role)
    this.#fresh(signed)
    return { text: data.toString(), signed }
  }

  async #manifest (targets, version) {
    const name = targetPath(version)
    const { length, hashes } = targets.targets[name]
    const data = await this.#get(name, length)
    const sound = data?.length === length && sha256(data) === hashes.sha256
    demand(sound, 'untrusted_metadata', 'the manifest is not the one that the targets name')
    return data
  }

  #fresh ({ _type, expires }) {
    demand(Date.parse(expires) > this.nowMs, 'metadata_expired', `${_type} has expired at ${expires}`)
  }

  #get (name, maxBytes = DOCUMENT_MAX_BYTES) {
    return get(`${this.address}/v1/metadata/${name}`, maxBytes)
  }
}

const targetPath = (version) => `policy-${String(version).padStart(12, '0')}.manifest`

// The highest policy version among targets; 0 if there is none.
function newest (targets) {
  const found = Object.keys(targets?.targets ?? {}).map((name) => MANIFEST.exec(name)?.[1])
  return Math.max(0, ...found.map((digits) => Number(digits ?? 0)))
}

// The ledger's public key, by a root document.
export const ledgerKeyOf = (root) => Buffer.from(JSON.parse(root).signed['x-echo-swarm-ledger'].keyval.public, 'hex')
