"""HTTP handlers: each parses a request, runs an effect and formats the reply. They hold no state and decide nothing."""
