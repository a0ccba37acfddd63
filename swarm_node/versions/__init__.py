"""Policy versions on this node's disk: finding, verifying, rebuilding from chunks, and keeping them."""
