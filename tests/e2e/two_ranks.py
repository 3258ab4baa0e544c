"""Fork two ranks of a script after its imports, which take most of its time.

    python tests/e2e/two_ranks.py SCRIPT ARGUMENTS [-- SCRIPT ARGUMENTS]...

Ranks run the script's `main`, with torchrun's variables. All scripts are imported first, then run in turn.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from launching import free_port


def main() -> None:
    scripts = [list(words) for is_script, words in itertools.groupby(sys.argv[1:], "--".__ne__) if is_script]
    mains = []
    for sys.argv in scripts:
        mains.append(importlib.import_module(Path(sys.argv[0]).stem).main)
    gc.freeze()  # a rank need not look through it
    for sys.argv, run in zip(scripts, mains, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2")
        alive, held = os.pipe()
        ranks = [_fork(run, rank, alive, held) for rank in range(2)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        os.close(held)
        if any(codes):
            sys.exit(f"ranks of {sys.argv} ended with {codes}")


def _fork(run: Callable[[], None], rank: int, alive: int, held: int) -> int:
    """Start a rank, and return its process id."""
    if process := os.fork():
        return process
    code = 1
    try:
        os.close(held)
        threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        run()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _end_with_parent(alive: int) -> None:
    os.read(alive, 1)
    os._exit(3)


if __name__ == "__main__":
    main()
