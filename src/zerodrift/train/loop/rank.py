"""Run one rank that `launcher` started: `python -m zerodrift.train.loop.rank ARGUMENTS`.

The rank ends when its launcher does, and writes its error to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback

from zerodrift.errors import ZerodriftError
from zerodrift.train.loop.launcher import LaunchRequest, write_failure
from zerodrift.train.loop.signals import IN_ORDER


def main(text: str) -> int:
    """Run the rank with the arguments that `Launcher` writes as JSON; return its exit code."""
    work = json.loads(text)
    threading.Thread(target=_end_with_launcher, args=(work["watch"],), daemon=True).start()
    try:
        if work["replay"] is not None:
            from zerodrift.train.tools.replay import replay_here

            replay_here(work["source"], work["overrides"], **work["replay"])
            return 0
        from zerodrift.train.loop.start import run_here

        code = run_here(work["source"], work["overrides"], LaunchRequest(**work["request"]))
        return IN_ORDER + code - 128 if code else 0
    except SystemExit as stopped:  # by a signal before the first step
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except KeyboardInterrupt:  # in a replay, which has nothing to finish
        os._exit(128 + signal.SIGINT)
    except BaseException as error:
        is_refused = isinstance(error, ZerodriftError)
        message = str(error) if is_refused and not work["debug"] else traceback.format_exc()
        with contextlib.suppress(OSError):  # the disk may be full, which the launcher reports
            write_failure(work["failure"], message, is_refused, time.monotonic())
            print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Threads of a broken process group may never come back.
        os._exit(2 if is_refused else 1)


def _end_with_launcher(pipe: int) -> None:
    """Wait for the end of the launcher, which closes the pipe however it ends."""
    os.read(pipe, 1)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
