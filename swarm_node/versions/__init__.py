"""Policy versions on this node's disk: found, verified, rebuilt from chunks, and kept."""
