"""The engine on llama.cpp: a policy's tensors in its layout, its graph, and its sampler."""
