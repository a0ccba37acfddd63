"""Benches: each file measures one thing against goals of its own; `make bench-NAME` runs bench/NAME.py."""
