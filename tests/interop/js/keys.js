// Ed25519 keys, node ids and envelopes, written from docs/protocol.md, sections 1 and 2.

import { createPrivateKey, createPublicKey, sign, verify } from 'node:crypto'
import { encode } from './canonical.js'

const PRIVATE_DER = Buffer.from('302e020100300506032b657004220420', 'hex')
const PUBLIC_DER = Buffer.from('302a300506032b6570032100', 'hex')
const ID_PREFIX = Buffer.from('002408011220', 'hex')
const BASE58 = '123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz'

function base58 (data) {
  let rest = BigInt('0x' + data.toString('hex'))
  let digits = ''
  for (; rest > 0n; rest /= 58n) digits = BASE58[Number(rest % 58n)] + digits
  const zeros = data.findIndex((byte) => byte !== 0)
  return '1'.repeat(zeros) + digits
}

// Whether a raw public key of 32 bytes has signed this.
export function signedBy (publicKey, data, signature) {
  if (publicKey.length !== 32 || signature.length !== 64) return false
  const key = createPublicKey({ key: Buffer.concat([PUBLIC_DER, publicKey]), format: 'der', type: 'spki' })
  return verify(null, data, key, signature)
}

export class NodeKey {
  #key

  constructor (seed) {
    this.#key = createPrivateKey({ key: Buffer.concat([PRIVATE_DER, seed]), format: 'der', type: 'pkcs8' })
    const publicKey = createPublicKey(this.#key).export({ format: 'der', type: 'spki' }).subarray(PUBLIC_DER.length)
    this.nodeId = base58(Buffer.concat([ID_PREFIX, publicKey]))
  }

  // An Envelope around a payload, signed for one domain.
  seal (domain, payload) {
    const signature = sign(null, Buffer.concat([Buffer.from(`echo-swarm/1/${domain}\0`), payload]), this.#key)
    return encode({ signer: this.nodeId, payload, signature })
  }
}
