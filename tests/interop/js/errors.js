// What goes wrong has a code: those of docs/protocol.md, section 7, whether the coordinator says so or we find it.

export class Refused extends Error {
  constructor (code, message, detail = {}) {
    super(message)
    this.code = code
    this.detail = detail
  }
}

export function demand (holds, code, message) {
  if (!holds) throw new Refused(code, message)
}
