"""The node agent: runs on a volunteer's GPU, trusts only signatures and hashes, and loses no finished work.

- One trio loop; only `p2p/` uses libp2p, and the sampling engine is a child process.
- Only signed versions run: `updater` verifies a version, `p2p` downloads it, `assemble` rebuilds it, `engine` loads it.
- Finished work is on the disk before it is sent (`outbox`), and is deleted after the coordinator's verdict.
"""
