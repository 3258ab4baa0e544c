"""Console script, and `python -m zerodrift`.

Invariant: Ctrl-C ends without a traceback, even while the command line is imported.
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from zerodrift import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
