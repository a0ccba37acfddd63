"""The data plane between nodes: the only folder that knows libp2p.

- `host` starts a libp2p host, `link` carries exchange frames over one stream, `serve` answers requests, `fetch`
  requests chunks from one upstream, `download` fetches a whole version from many upstreams.
- Noise authenticates and encrypts every connection; no other security protocol is offered. Chunks are checked by hash.
- `noise` and `yamux` are our own session and muxer, under libp2p's protocol names (decision 7).
- `workarounds` holds every other departure from stock py-libp2p, with the defect that makes it necessary.
"""

__all__ = ["download", "fetch", "host", "serve"]
