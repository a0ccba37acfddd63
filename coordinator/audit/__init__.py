"""Audit by replay: check that a rollout was sampled from the claimed version with the seed of its lease.

One prefill gives the auditor the distribution that every token was drawn from, and the seed determines the draws.
`replay` measures, `verdict` judges, `calibration` has the tolerances of honest nodes, `scorer` runs the model.
"""

__all__ = ["auditor", "case", "check", "exact_scorer", "rounding", "scorer"]
