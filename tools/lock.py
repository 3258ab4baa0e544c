"""Pin every package of the development environment, for `make lock`.

Asks uv for one answer that holds on Python 3.10 to 3.13 and on every platform, from the ranges in
pyproject.toml, and writes it as two files that any pip can install:

- requirements/lock.txt: everything but torch and CUDA's libraries, with hashes.
- requirements/torch.txt: torch and CUDA's libraries, as constraints without hashes. One version of torch
  comes in several builds, for CPUs and for CUDA, and the machine decides which one is installed.

    python tools/lock.py torch==2.13.0                        # the newest of everything beside this torch
    python tools/lock.py torch==2.13.0 --until 2026-11-25     # what there was before that day
    python tools/lock.py torch==2.13.0 --dry                  # say what would change, and write nothing
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import LOCK, ROOT, TORCH

UV = "uv==0.13.9"
BUILD = ("pip", "setuptools>=77")
"""Packages that make the environment and build zerodrift in it."""
OF_TORCH = re.compile(r"torch|(nvidia|cuda)-.*")

HEAD = """\
# Written by `make lock`; do not edit. {what}
# For Python 3.10 to 3.13 on every platform. `pip install zerodrift` goes by the ranges in pyproject.toml.
"""


def resolve(torch: str, until: str | None) -> str:
    """Return uv's answer as requirements with hashes, one block of lines a package."""
    with tempfile.TemporaryDirectory() as folder:
        home, asked, found = Path(folder, "uv"), Path(folder, "asked.in"), Path(folder, "found.txt")
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", UV], check=True)
        asked.write_text("\n".join([torch, *BUILD]))
        command = [str(home / "bin" / "uv"), "pip", "compile", "--universal", "--python-version", "3.10"]
        command += ["--generate-hashes", "--no-annotate", "--no-header", "--quiet", "--no-config"]
        command += ["--extra", "dev", "pyproject.toml", str(asked), "--output-file", str(found)]
        command += ["--exclude-newer", until] if until else []
        subprocess.run(command, check=True, cwd=ROOT)
        return found.read_text()


def split(found: str) -> tuple[str, str]:
    """Return the text of lock.txt and that of torch.txt."""
    blocks = re.findall(r"^\S.*?(?=^\S|\Z)", found, re.MULTILINE | re.DOTALL)
    of_torch = [block for block in blocks if OF_TORCH.fullmatch(block.partition("==")[0])]
    others = [block for block in blocks if block not in of_torch]
    pins = [block.partition("\n")[0].removesuffix("\\").rstrip() + "\n" for block in of_torch]
    return (
        HEAD.format(what="Everything but torch and CUDA's libraries.") + "".join(others),
        HEAD.format(what="Constraints for torch and CUDA's libraries.") + "".join(pins),
    )


def pins(text: str) -> dict[str, set[str]]:
    """Return package -> versions, of which one package may have several, for several Pythons."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


def changes(before: str, after: str) -> list[str]:
    """Return one line for each package whose pin differs between two texts."""
    old, new = pins(before), pins(after)
    lines = []
    for name in sorted(old.keys() | new.keys()):
        was, becomes = (" and ".join(sorted(each.get(name, ()))) or "none" for each in (old, new))
        if was != becomes:
            lines.append(f"  {name}: {was} -> {becomes}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Pin every package of the development environment.")
    parser.add_argument("torch", metavar="TORCH==VERSION")
    parser.add_argument("--until", metavar="DATE", help="nothing that was uploaded later")
    parser.add_argument("--dry", action="store_true", help="say what would change, and write nothing")
    asked = parser.parse_args()
    found = dict(zip((LOCK, TORCH), split(resolve(asked.torch, asked.until)), strict=True))
    before = "".join(path.read_text() for path in found if path.exists())
    lines = changes(before, "".join(found.values()))
    print("\n".join(["The pins that change:", *lines] if lines else ["No pin changes."]))
    if asked.dry:
        return
    for path, text in found.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    print(f"{LOCK.relative_to(ROOT)}: {len(pins(found[LOCK]))} packages; make demo, make test use them")


if __name__ == "__main__":
    main()
