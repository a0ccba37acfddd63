"""The sampling engine: a child process, so that its crash, its memory and its libraries are never the agent's."""
