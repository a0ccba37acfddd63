"""Our objectives against TRL's own code; `make test-trl` has TRL in an environment of its own."""
