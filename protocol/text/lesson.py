"""The end of a command's help: an example, the next step, and the meaning of the exit codes."""


def lesson(example: str, then: str, codes: str) -> str:
    """Return the end of a help text; empty lines separate its paragraphs, the only breaks that `--help` keeps."""
    return "\n\n".join((f"Example: {example}", f"Then: {then}", codes))
