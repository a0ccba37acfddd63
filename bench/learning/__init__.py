"""Does it learn, and what does the age of its groups cost? Four tasks, by the corrected objective and by plain GRPO."""
