"""The sampling engine: a child process, so that its crashes, memory and libraries do not affect the agent."""
