"""How versions reach the nodes: trees planned from measured links, and how the last versions spread."""
