"""Torch code that nodes and auditors share: a model's tensors, and a forward pass that repeats to the bit."""
