"""Read-only queries and the figures made of them, for pages, terminal, API and Prometheus."""
