"""The engine on torch: Qwen3's own decoder, and any model that transformers loads."""
