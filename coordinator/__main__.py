"""`swarm-coordinator` from its first moment on: Ctrl-C ends it in silence, also while its modules are read."""

import os
import sys

NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "1")
"""The search for plugins reads every installed package. None is to see settings and signed messages."""

OTHER_LOOP = ("trio",)
"""The event loop of nodes: HTTP clients import it if it is installed, and this program runs on asyncio."""


def main() -> None:
    """Run a command; whoever interrupts it knows why it ended."""
    os.environ.setdefault(*NO_PLUGINS)
    try:
        from protocol.start import UNUSED, end_quickly, leave_out, quick_imports

        end_quickly()
        leave_out(*UNUSED, *OTHER_LOOP)
        with quick_imports():
            from coordinator import cli

        cli.main()
    except KeyboardInterrupt:  # before the program could take the signal itself
        sys.exit(130)


if __name__ == "__main__":
    main()
