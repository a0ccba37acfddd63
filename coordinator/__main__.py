"""`swarm-coordinator` from its first moment on: Ctrl-C ends it in silence, also while its modules are read."""

import sys


def main() -> None:
    """Run a command; whoever interrupts it knows why it ended."""
    try:
        from protocol.start import prepare, quick_imports

        prepare()
        with quick_imports():
            from coordinator import cli

        cli.main()
    except KeyboardInterrupt:  # before the program could take the signal itself
        sys.exit(130)


if __name__ == "__main__":
    main()
