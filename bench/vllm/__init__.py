"""Our vLLM child against vLLM itself."""
