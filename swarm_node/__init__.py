"""The node agent: runs on a stranger's GPU, trusts signatures and hashes only, and loses no work it has done.

- One trio loop; libp2p is known to `p2p/` alone, and the sampling engine is a child process.
- Nothing runs unsigned: `updater` proves a version, `p2p` fetches it, `assemble` rebuilds it, `engine` loads it.
- Finished work is on the disk before it is sent (`outbox`), and leaves it when the coordinator has given its verdict.
"""
