"""The vLLM engine for real, in the environment that `make test-vllm` makes; without it these tests are skipped."""
