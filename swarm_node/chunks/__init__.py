"""Chunks on this node: the store, announcements of arrivals, and files that grow from chunks."""
