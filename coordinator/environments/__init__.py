"""Environments: what the policy reads after each of its turns, and the reward at the end of an episode."""
