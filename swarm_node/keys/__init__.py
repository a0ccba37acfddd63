"""Keys of a node and its owner: creation, storage, delegation and rotation."""
