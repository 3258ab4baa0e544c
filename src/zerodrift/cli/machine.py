"""Start on a new machine: `examples`, `doctor`.

Invariant: no existing file is changed.
"""

from __future__ import annotations

import json as json_module
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path

from zerodrift.cli import options, streams
from zerodrift.errors import ZerodriftError
from zerodrift.legible import legible

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DOCS = EXAMPLES.with_name("docs")
WRITTEN = (".yaml", ".json", ".md", ".py")
"""Suffixes of example files."""


def examples(
    copy: options.CopyExamples = False,
    folder: options.ExamplesFolder = Path("examples"),
    debug: options.Debug = False,
) -> None:
    """List the examples with what each of them shows, or copy them to a folder of your own.

    \b
    Examples:
      zerodrift examples
      zerodrift examples --copy
    """
    with streams.errors(debug):
        if not EXAMPLES.is_dir():
            must, todo = "must be installed with the package", "Install it from a wheel, or clone it."
            raise ZerodriftError(EXAMPLES, must, got="no such folder", do=todo)
        streams.emit(_copy(folder) if copy else _list(streams.layout()["width"]))


def doctor(json: options.Json = False, debug: options.Debug = False) -> None:
    """Show what this machine has to train with: versions and whether they are tested, devices, carriers
    between ranks, the compiler; what is slow here, and why. A product of small matrices is timed; nothing
    is changed.

    \b
    Examples:
      zerodrift doctor
      zerodrift doctor --json
    """
    with streams.errors(debug):
        from zerodrift.train import doctor_text, examine

        with streams.progress("looking"):
            findings = examine(streams.environment())
        if json:
            streams.emit(json_module.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
        else:
            streams.emit(doctor_text(findings, **streams.layout()))


def _files() -> list[Path]:
    return sorted(path for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix in WRITTEN)


def _list(width: int) -> str:
    """List the examples with their first sentences."""
    lines: list[str] = []
    for path in _files():
        lines.append(path.relative_to(EXAMPLES).as_posix())
        lines += textwrap.wrap(_summary(path), width, initial_indent=" " * 4, subsequent_indent=" " * 4)
    end = "Copy them with `zerodrift examples --copy`, into the folder `examples`."
    return "\n".join([*lines, "", end, f"Pages about them: {legible(str(DOCS))}", ""])


def _summary(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file."""
    if path.suffix not in (".yaml", ".py"):
        return ""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip('#" ')
        if not text or not (line.startswith(("#", '"')) or path.suffix == ".py"):
            break
        words.append(text)
        if text.endswith(".") or ". " in text:
            break
    return " ".join(words).partition(". ")[0].rstrip(".")


def _copy(folder: Path) -> str:
    """Copy the examples, with paths to each other adapted to the new folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ZerodriftError(folder, "must be an empty folder, or not be there", got="something else")
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    place = folder.as_posix().rstrip("/")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in WRITTEN and place != "examples":
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace("examples/", f"{place}/"), encoding="utf-8")
    command = f"zerodrift train {place}/jobs/demo.yaml --set data.train=path/to/text --set data.pattern="
    return f"{len(_files())} files in {legible(str(folder))}. To begin:\n  {command}\n"
