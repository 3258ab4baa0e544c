"""What `check` does at the start of every Python process: wait for torch, and import nothing until then."""

from __future__ import annotations

from types import ModuleType

from zerodrift.observer.imports import when_imported
from zerodrift.startup import tell_failure


def watch_with_torch(folder: str, steps: int, keep_going: bool) -> None:
    """Begin to watch as soon as the process has imported torch."""

    def begin(torch: ModuleType) -> None:
        try:
            from zerodrift.observer.process import begin

            begin(f"{folder}/seen", steps, keep_going)
        except Exception as error:
            tell_failure(folder, error)

    when_imported("torch", begin)
