"""The schedules of a pipeline, with the ways to form deferred weight gradients."""

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
