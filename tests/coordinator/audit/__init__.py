"""The audit by replay."""
