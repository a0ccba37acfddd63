"""Chunks on this node: the store, news of what has come, and files that grow from them."""
