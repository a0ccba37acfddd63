"""The failures that must already work, each with real processes on loopback; see `programs` for the ground rules."""
