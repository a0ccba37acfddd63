"""From one schema of a round's store to the next: a step per file in `versions/`, run by `coordinator.store.upgrading`.

- A step is `versions/step_NNNN_what.py`: `revision` and `down_revision` are numbers, the docstring's first line is
  what operators read, `upgrade()` says what changes, with Alembic's operations.
- A step runs in one transaction on both databases, with the number it leads to: it has happened, or it has not.
- Steps go forward only; the way back is the backup that was made before.
- A step never imports `coordinator.store.tables`: those are of today, and the step stays as it is.
- Whoever changes a table adds a step and raises `coordinator.store.schema.SCHEMA`;
  `tests/coordinator/store/test_migrations.py` says what to write if that was forgotten.
"""
