"""What a refusal says to do, in the words of somebody who has a job file and a shell.

The rooms below are a library's, and some of what they advise is an argument of `initialize`. A job has a key
for it, or cannot have it.

Invariant: only what to do is said otherwise; what must hold and what there is instead stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from zerodrift.errors import ZerodriftError

_IN_A_JOB = (
    (
        r"Pass --auto (\S+?)=\.\.\. on the command line, or auto=\{.*?\} in Python\.",
        r"Set it in the job's `auto`: `--set 'auto={\1: NUMBER}'`.",
    ),
    (
        r"Any (other elementwise optimizer|torch scheduler): build it and pass it to `initialize`\.",
        r"A job takes these alone; any \1 goes to `zerodrift.initialize`, in Python.",
    ),
    (
        r"Build the optimizer yourself and pass it to `initialize`\.",
        r"One that is built by hand goes to `zerodrift.initialize`, in Python.",
    ),
    (
        r"[Pp]ass `parts=zerodrift\.Parts\(\.\.\.\)`(?: to `initialize`)?",
        r"Name a function that returns `zerodrift.Parts` in `model.parts`",
    ),
    (r"`device='cpu'`", r"`run.device: cpu`"),
)


def for_a_job(text: str) -> str:
    """Advice with keys and flags for arguments."""
    for pattern, words in _IN_A_JOB:
        text = re.sub(pattern, words, text)
    return text


@contextmanager
def worded_for_a_job() -> Iterator[None]:
    """Refusals inside are raised in these words."""
    try:
        yield
    except ZerodriftError as error:
        if for_a_job(str(error)) == str(error):
            raise
        raise error.reworded(for_a_job) from error.__cause__
