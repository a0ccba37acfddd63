// A receipt, written from docs/ledger.md, "Receipts and proofs": entries that are in the log, by the round's id alone.

import { decode, fields, message } from './canonical.js'
import { demand } from './errors.js'
import { included, leaf, readCheckpoint } from './log.js'
import { checkRoots, ledgerKeyOf } from './trust.js'

const KIND = 'echo-swarm/receipt'

// The entries that it proves.
export function readReceipt (data, roundId) {
  const { kind, roots, checkpoint: note, entries } = message(data, 'kind', 'roots', 'checkpoint', 'entries')
  demand(kind === KIND, 'proof_invalid', 'no receipt')
  checkRoots(roots, roundId)
  const checkpoint = readCheckpoint(note.toString(), roundId, roots.map(ledgerKeyOf))
  return entries.map((held) => {
    const { index, entry, proof } = fields(held, 'index', 'entry', 'proof')
    const shown = included(leaf(entry), index, checkpoint.size, proof, checkpoint.root)
    demand(shown, 'proof_invalid', `the receipt does not prove entry ${index}`)
    return decode(entry)
  })
}
