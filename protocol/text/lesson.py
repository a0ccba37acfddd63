"""What stands below a command's options: how it is typed, what comes after it, and what its exit codes mean."""


def lesson(example: str, then: str, codes: str) -> str:
    """As both programs give it to `--help`, which keeps only empty lines."""
    return "\n\n".join((f"Example: {example}", f"Then: {then}", codes))
