"""One process of the command `deepspeed`: run the script with `--local_rank` before its own arguments.

python -m zerodrift.deepspeed.rank [-m | --no-python] SCRIPT ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import sys

from zerodrift.deepspeed.launch import local_rank


def main() -> None:
    kind = sys.argv.pop(1) if sys.argv[1] in ("-m", "--no-python") else ""
    del sys.argv[0]
    script = sys.argv[0]
    sys.argv.insert(1, f"--local_rank={local_rank()}")
    if kind == "--no-python":
        os.execvp(script, sys.argv)
    elif kind == "-m":
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
