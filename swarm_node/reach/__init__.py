"""Reachability of this node: its listening address, and the router's port mapping."""

__all__ = ["listening", "mapping"]
