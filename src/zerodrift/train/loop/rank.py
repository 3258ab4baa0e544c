"""One rank of a run that `launch` started: `python -m zerodrift.train.loop.rank WORK`.

Invariant: it ends when its launcher does, and says in a file why it failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback

from zerodrift.errors import ZerodriftError
from zerodrift.train.loop.launcher import Failure, RankArguments, write_failure
from zerodrift.train.loop.signals import IN_ORDER


def main(text: str) -> int:
    work = RankArguments.from_json(text)
    threading.Thread(target=_end_with, args=(work.watch,), daemon=True).start()
    try:
        if work.replay is not None:
            from zerodrift.train.tools.replay import Request, replay_here

            replay_here(work.source, work.overrides, Request(**work.replay))
        else:
            from zerodrift.train.loop.start import run_here

            code = run_here(work.source, work.overrides, work.asked)
            return IN_ORDER + code - 128 if code else 0
        return 0
    except SystemExit as stopped:  # by a signal before the first step
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except KeyboardInterrupt:  # in a replay, which has nothing to finish
        os._exit(128 + signal.SIGINT)
    except BaseException as error:
        refused = isinstance(error, ZerodriftError)
        message = str(error) if refused and not work.debug else traceback.format_exc()
        with contextlib.suppress(OSError):  # the disk may be full, which the launcher finds out
            write_failure(work.failure, Failure(time.monotonic(), message, refused))
            print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Threads of a broken process group may never come back.
        os._exit(2 if refused else 1)


def _end_with(pipe: int) -> None:
    """Nobody writes to it: it ends when the launcher does, however that ends."""
    os.read(pipe, 1)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
