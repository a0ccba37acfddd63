"""ECHO-2's own tables and figures, computed by our capacity model, fleet, topology and simulator.

The setting is reconstructed where the paper does not state it; bench/RESULTS.md says what was fitted and what came out.
"""
