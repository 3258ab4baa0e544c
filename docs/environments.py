"""Environments that a script makes for what it tries, one a folder, and used again.

Invariant: what is in a folder that is used is what is asked for today.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(home: Path, python: str, torch: Sequence[str], *rest: Sequence[str]) -> Path:
    """The interpreter in a folder, into which pip installed first torch, then the rest, list by list.

    One that was made of other lists, or not to its end, is made anew. What pip says is in `log_of(home)`.
    """
    asked = json.dumps([python, torch, rest])
    interpreter, made = home / "bin" / "python", home / "made-of.json"
    if made.exists() and made.read_text() == asked:
        return interpreter
    home.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(interpreter), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    commands = [[python, "-m", "venv", "--clear", str(home)], [*pip, "--upgrade", "pip"]]
    commands += [[*pip, *each] for each in (torch, *rest)]
    print(f"making {home}, for some minutes; what pip says is in {log_of(home)}", flush=True)
    with log_of(home).open("w") as said:
        for command in commands:
            print(f"$ {' '.join(command)}", file=said, flush=True)
            subprocess.run(
                command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"}, stdout=said, stderr=said
            )
    made.write_text(asked)
    return interpreter


def log_of(home: Path) -> Path:
    return home.with_name(f"{home.name}.log")
