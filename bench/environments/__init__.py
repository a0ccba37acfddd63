"""Speed of environments, latency of turns, and throughput of episodes in a whole round."""
