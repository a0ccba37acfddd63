"""Comparison of our vLLM child with vLLM itself."""
