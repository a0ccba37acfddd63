"""Entry point of `swarm-node`: Ctrl-C ends it silently, also while its modules are imported."""

import sys


def main() -> None:
    """Run a command; an interrupt ends it without a message."""
    try:
        from protocol.start import prepare, quick_imports

        prepare()
        with quick_imports():
            from swarm_node import cli

        cli.main()
    except KeyboardInterrupt:  # before the program handles the signal itself
        sys.exit(130)


if __name__ == "__main__":
    main()
