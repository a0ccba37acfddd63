"""Entry point of `swarm-node`: Ctrl-C ends it silently, also while its modules are imported."""

import os
import sys

NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "1")
"""The search for plugins reads every installed package. None is to see signed messages."""


def main() -> None:
    """Run a command; an interrupt ends it without a message."""
    os.environ.setdefault(*NO_PLUGINS)
    try:
        from protocol.start import UNUSED, end_quickly, leave_out, quick_imports

        end_quickly()
        leave_out(*UNUSED)
        with quick_imports():
            from swarm_node import cli
        cli.main()
    except KeyboardInterrupt:  # before the program handles the signal itself
        sys.exit(130)


if __name__ == "__main__":
    main()
