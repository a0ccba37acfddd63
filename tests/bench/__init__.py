"""The bench harness: what it records, prints and returns."""
