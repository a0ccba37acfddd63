"""A real model, SmolLM2-135M, against what others sample and train it with."""
