"""What is told of a round: to its pages, to its operator's terminal, to Prometheus.

- Everything here only reads; a figure that more than one place shows is computed once, in `summary` or `ranking`.
"""
