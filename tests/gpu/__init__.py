"""`make test-gpu`: the engine, the learner and the audit on CUDA."""
