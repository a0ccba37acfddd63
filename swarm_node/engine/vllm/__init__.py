"""The engine on vLLM, which runs in an environment of its own."""
