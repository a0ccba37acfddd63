// A peer that is not ours: js-libp2p and `exchange.js`. What it says is one line of JSON each.
//
//   node peer.js fetch ADDRESS NAME… [--cancel NAME…]   fetch chunks, print what became of each
//   node peer.js serve FOLDER                           serve the chunks below a folder, until standard input ends
//
// ADDRESS is a multiaddress with the peer id: /ip4/127.0.0.1/tcp/4001/p2p/12D3Koo…

import { readdirSync, readFileSync } from 'node:fs'
import path from 'node:path'
import { parseArgs } from 'node:util'
import { noise } from '@libp2p/noise'
import { tcp } from '@libp2p/tcp'
import { yamux } from '@libp2p/yamux'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { PROTOCOL, Requester, respond, WANTS_MAX } from './exchange.js'

// js-libp2p uses it, and Node has it since 22.
Promise.withResolvers ??= function () {
  const made = {}
  made.promise = new this((resolve, reject) => Object.assign(made, { resolve, reject }))
  return made
}

const say = (what) => console.log(JSON.stringify(what))

const open = (...listen) => createLibp2p({
  addresses: { listen },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()]
})

async function fetch (address, names, cancelled) {
  const node = await open()
  const requester = new Requester(await node.dialProtocol(multiaddr(address), PROTOCOL))
  const ended = requester.run()
  const waiting = [...cancelled, ...names].values()
  const askOn = async () => {
    for (const name of waiting) {
      const answer = requester.want(name)
      if (cancelled.includes(name)) await requester.cancel(name)
      const { data, rejected } = await answer
      say({ name, bytes: data?.length, rejected })
    }
  }
  await Promise.all(Array.from({ length: WANTS_MAX }, askOn))
  await requester.bye()
  say({ farewell: await ended, told: [...requester.told] })
  await node.stop()
}

async function serve (folder) {
  const files = readdirSync(folder, { recursive: true }).filter((file) => /^[0-9a-f]{64}$/.test(path.basename(file)))
  const chunks = new Map(files.map((file) => [path.basename(file), readFileSync(path.join(folder, file))]))
  const node = await open('/ip4/127.0.0.1/tcp/0')
  await node.handle(PROTOCOL, async (stream) => {
    try {
      await respond(stream, chunks)
    } catch (error) {
      stream.abort(error)
    }
  })
  say({ peer: node.peerId.toString(), address: node.getMultiaddrs()[0].toString() })
  process.stdin.resume().on('end', () => node.stop())
}

const { positionals: [command, target, ...names], values } = parseArgs({
  allowPositionals: true,
  options: { cancel: { type: 'string', multiple: true, default: [] } }
})
await (command === 'serve' ? serve(target) : fetch(target, names, values.cancel))
