"""What is given out and what comes back: prompts, leases, intake, rewards, batches, evaluations; mostly effects."""
