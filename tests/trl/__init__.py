"""Comparison of our objectives with TRL's own code; `make test-trl` has TRL in an environment of its own."""
