"""The keys of a node and of its owner: made, kept, delegated and replaced."""
