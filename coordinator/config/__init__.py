"""The operator's one TOML file, strict: an unknown key is refused with the nearest name.

- Every key has a default that works; units are in the names.
- `--set section.key=value` changes one key from the command line, with the same checks.
- One module per group of sections; a new key belongs to its section, and nowhere else but the manual.
- The resolved configuration is stored with the round, so that a restart uses the same settings.
"""

from coordinator.config.audit import AuditSection
from coordinator.config.learner import AlgorithmName, CorrectionSection, ObjectiveSection
from coordinator.config.money import PayoutsSection
from coordinator.config.reading import load, parse
from coordinator.config.round import ModelSection, NotifySection
from coordinator.config.task import DataSection, EvalSection
from coordinator.config.whole import Config

__all__ = [
    "AlgorithmName",
    "AuditSection",
    "Config",
    "CorrectionSection",
    "DataSection",
    "EvalSection",
    "ModelSection",
    "NotifySection",
    "ObjectiveSection",
    "PayoutsSection",
    "fixed",
    "load",
    "manual",
    "money",
    "parse",
    "reading",
    "round",
    "section",
    "task",
    "work",
]
