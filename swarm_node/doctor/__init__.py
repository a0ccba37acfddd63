"""Is this machine fit for a round? Small checks, each with its root cause, the evidence, and the next step."""
