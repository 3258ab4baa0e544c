"""The schedules of a pipeline, and for those that put weight gradients off, who forms them."""

from __future__ import annotations

WAYS = [
    ("gpipe", None),
    ("1f1b", None),
    ("interleaved", None),
    ("interleaved-zero-bubble", "queue"),
    ("interleaved-zero-bubble", "autograd"),
    ("zbv", "queue"),
    ("zbv", "autograd"),
    ("dualpipev", "queue"),
    ("dualpipev", "autograd"),
]
