"""Steps from one schema of a round's store to the next: one file each in `versions/`, run by `store.upgrading`.

- A step is `versions/step_NNNN_what.py`: `revision` and `down_revision` are numbers, operators see
  the docstring's first line, and `upgrade()` makes the changes, with Alembic's operations.
- A step runs in one transaction on both databases, with the number it leads to: it is applied completely, or not at
  all.
- Steps go forward only; to go back, restore the backup that was made before.
- A step never imports `coordinator.store.tables`: these change, and a step does not.
- Every change of a table needs a new step and a higher `coordinator.store.schema.SCHEMA`;
  `tests/coordinator/store/test_migrations.py` says what to write if that was forgotten.
"""
