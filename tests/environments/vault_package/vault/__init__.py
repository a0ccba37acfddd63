"""A safe to open: a taskset for verifiers with a tool and a user."""

from .taskset import VaultEnv, VaultTaskset

__all__ = ["VaultEnv", "VaultTaskset"]
