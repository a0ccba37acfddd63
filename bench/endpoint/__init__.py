"""The endpoint: its overhead, many callers at once, and fairness between keys."""
