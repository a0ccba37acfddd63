"""The data plane between nodes: the only folder that knows libp2p.

- `host` starts a libp2p host, `link` carries exchange frames over one stream, `serve` answers, `fetch` asks one
  upstream, `download` brings a whole version in from many.
- Peers are authenticated and encrypted by Noise, and nothing else is offered; what they send is proved by its hash.
- `noise` and `yamux` carry the bytes: a session and a muxer of our own, under libp2p's names (decision 7).
- `workarounds` holds every other departure from stock py-libp2p, with the defect that makes it necessary.
"""
