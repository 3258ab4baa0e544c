"""The console script, and `python -m zerodrift`.

Invariant: Ctrl-C while a verb is still imported ends as Ctrl-C in the verb does, without a traceback. So
nothing is imported before.
"""

import sys


def main() -> None:
    """Run the verb that was typed."""
    try:
        from zerodrift import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
