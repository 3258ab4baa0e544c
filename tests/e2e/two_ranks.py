"""Fork two ranks of a script after its imports, which take most of its time.

    python tests/e2e/two_ranks.py SCRIPT ARGUMENTS

Ranks run the script's `main`, with torchrun's variables.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from pathlib import Path


def main() -> None:
    del sys.argv[0]
    script = Path(sys.argv[0])
    sys.path[0] = str(script.parent)
    run = importlib.import_module(script.stem).main
    gc.freeze()  # a rank need not look through it
    alive, held = os.pipe()
    other = os.fork()
    rank = "0" if other else "1"
    if not other:
        os.close(held)
        threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    os.environ.update(WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
    run()
    if other:
        _, status = os.waitpid(other, 0)
        sys.exit(os.waitstatus_to_exitcode(status))


def _end_with(alive: int) -> None:
    """End with the first rank."""
    os.read(alive, 1)
    os._exit(3)


if __name__ == "__main__":
    main()
