"""Text that strangers may have written, made fit for a log or a terminal."""


def one_line(text: str) -> str:
    """The same with what would begin a line or steer a terminal written out, as `\\n` or `\\x1b`."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "surrogatepass").decode() for sign in text
    )
