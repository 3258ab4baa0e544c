"""`python -m zerodrift`: the same as the console script."""

from zerodrift.cli import main

main()
