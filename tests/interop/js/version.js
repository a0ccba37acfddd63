// A policy version from its manifest and its chunks, written from docs/protocol.md, section 4.
//
// - A chunk is hashed before it is kept, a file before it is used.
// - Only the way from nothing is taken, and no patch is applied: Node 20 has no zstd.

import { mkdirSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { digest } from './blake3.js'
import { fields, message } from './canonical.js'
import { demand } from './errors.js'
import { get } from './web.js'

const MANIFEST = ['round_id', 'version', 'update', 'parent', 'task', 'sampler', 'chunk_size_bytes', 'files']
const FILE = ['path', 'size_bytes', 'digest', 'chunks', 'patches', 'patches_after_anchor']
const BARE_NAME = /^[A-Za-z0-9_][A-Za-z0-9_.-]*$/

export function readManifest (data, roundId, version) {
  const manifest = message(data, ...MANIFEST)
  fields(manifest.sampler, 'temperature', 'max_new_tokens')
  const own = manifest.round_id === roundId && manifest.version === version
  demand(own, 'manifest_invalid', 'a manifest of another round or version')
  for (const file of manifest.files) {
    fields(file, ...FILE)
    demand(BARE_NAME.test(file.path), 'manifest_invalid', `${file.path} is no bare name`)
  }
  return manifest
}

async function chunk (address, name, sizeBytes) {
  const data = await get(`${address}/v1/chunks/${name.slice(0, 2)}/${name}`, sizeBytes)
  demand(data, 'unknown_chunk', `${name} is not here`)
  demand(data.length === sizeBytes && digest(data) === name, 'chunk_mismatch', `wrong bytes for ${name}`)
  return data
}

// Every file of a version in a folder; path → bytes.
export async function fetchVersion (address, manifest, folder) {
  mkdirSync(folder, { recursive: true })
  const files = {}
  for (const file of manifest.files) {
    demand(file.patches_after_anchor === 0, 'patch_invalid', `${file.path} is patched, which this client cannot do`)
    const pieces = []
    let missing = file.size_bytes
    for (const name of file.chunks) {
      const size = Math.min(manifest.chunk_size_bytes, missing)
      pieces.push(await chunk(address, name, size))
      missing -= size
    }
    const data = Buffer.concat(pieces)
    const whole = data.length === file.size_bytes && digest(data) === file.digest
    demand(whole, 'manifest_invalid', `the chunks of ${file.path} do not make it`)
    writeFileSync(path.join(folder, file.path), data)
    files[file.path] = data
  }
  return files
}
