"""Audit by replay: is a rollout what its lease's seed makes of the claimed version?

One prefill gives the auditor the distribution that every token was drawn from, and the seed says what had to be drawn.
`replay` measures, `verdict` judges, `calibration` says how much is no cause for suspicion, `scorer` runs the model.
"""
