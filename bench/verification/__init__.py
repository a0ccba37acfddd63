"""Results of the replay check: honest rollouts rejected, cheats detected, and the cost of an audit.

- The bench trains a model of its own, makes honest and dishonest rollouts with it, and judges each as an auditor does.
- The tolerances are those that ship with the coordinator; `--calibrate FILE` makes them anew, from other prompts.
"""
