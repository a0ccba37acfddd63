"""Text for people that both programs write: safe text, log lines, help."""
