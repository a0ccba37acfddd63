// Files over HTTP as docs/protocol.md, "Origins", asks: no redirect, nothing unpacked, no byte beyond what may come.

import { Refused } from './errors.js'

const GONE = [403, 404, 410]
const PATIENCE_MS = 30_000

// The bytes of a file, at most so many, or null if it is not here.
export async function get (url, maxBytes) {
  const headers = { 'accept-encoding': 'identity' }
  const asked = fetch(url, { headers, redirect: 'error', signal: AbortSignal.timeout(PATIENCE_MS) })
  const answer = await asked.catch((error) => { throw new Refused('unreachable', `${url}: ${error.message}`) })
  if (GONE.includes(answer.status)) {
    await answer.body?.cancel()
    return null
  }
  if (!answer.ok) throw new Refused('unreachable', `${url} answers ${answer.status}`)
  const pieces = []
  let size = 0
  for await (const piece of answer.body) {
    size += piece.length
    if (size > maxBytes) throw new Refused('message_too_large', `${url} has more than ${maxBytes} bytes`)
    pieces.push(piece)
  }
  return Buffer.concat(pieces)
}
