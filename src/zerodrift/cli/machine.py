"""Start on a new machine: `examples`, `doctor`, `help`.

Invariant: no existing file is changed.
"""

from __future__ import annotations

import json as json_module
import os
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from zerodrift.cli import options, streams
from zerodrift.errors import ZerodriftError, did_you_mean
from zerodrift.legible import legible

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DOCS = EXAMPLES.with_name("docs")
WRITTEN = (".yaml", ".json", ".md", ".py", ".ipynb")  # suffixes of example files


def examples(
    copy: options.CopyExamples = False,
    folder: options.ExamplesFolder = Path("examples"),
    debug: options.Debug = False,
) -> None:
    """List the examples and what each one shows, or copy them to a folder.

    \b
    Examples:
      zerodrift examples
      zerodrift examples --copy
    """
    with streams.errors(debug):
        _require_installed(EXAMPLES, "folder")
        streams.emit(_copy(folder) if copy else _list(streams.layout()["width"]))


def doctor(json: options.Json = False, debug: options.Debug = False) -> None:
    """Show this machine: tested and installed versions, devices, communication backends, the compiler, and
    what is slow and why. Times a product of small matrices, and changes nothing.

    \b
    Examples:
      zerodrift doctor
      zerodrift doctor --json
    """
    with streams.errors(debug):
        from zerodrift.train import doctor_text, examine

        with streams.progress("examining"):
            findings = examine(os.environ)
        if json:
            streams.emit(json_module.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
        else:
            streams.emit(doctor_text(findings, **streams.layout()))


def explain_name(context: typer.Context, name: options.HelpTopic = "", debug: options.Debug = False) -> None:
    """Explain an error, a finding or a command by its name, without a network.

    \b
    Examples:
      zerodrift help
      zerodrift help unknown-key
      zerodrift help plan
    """
    with streams.errors(debug):
        topics, wanted = _topics(), name.strip("`").replace(" ", "-")
        commands: Mapping[str, Any] = context.parent.command.commands  # type: ignore[union-attr]
        named = {each: command.short_help for each, command in commands.items()} | topics
        if wanted in commands:
            made = commands[wanted].make_context(wanted, [], parent=context.parent, resilient_parsing=True)
            streams.emit(f"{made.get_help()}\n")
        elif not wanted:
            end = ["", "`zerodrift help NAME` explains one of them.", ""]
            streams.emit("\n".join([*_listing(named, streams.layout()["width"]), *end]))
        elif wanted in topics:
            from zerodrift.report import markdown_text

            streams.emit(markdown_text(f"## {wanted}\n{topics[wanted]}", **streams.layout()))
        else:
            todo = did_you_mean(wanted, named) or "`zerodrift help` lists all names."
            must = "must match an error, a finding or a command"
            raise ZerodriftError("NAME", must, got=repr(name), do=todo)


def _require_installed(path: Path, kind: str) -> None:
    if not path.exists():
        must, todo = "must be installed with the package", "Install it from a wheel, or clone it."
        raise ZerodriftError(path, must, got=f"no such {kind}", do=todo)


def _topics() -> dict[str, str]:
    """Return the sections of docs/errors.md: name -> text."""
    page = DOCS / "errors.md"
    _require_installed(page, "file")
    parts = re.split(r"^### (.+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    names, texts = parts[::2], (re.split(r"^## ", text, flags=re.MULTILINE)[0] for text in parts[1::2])
    return {name.strip("`"): text.strip() + "\n" for name, text in zip(names, texts, strict=True)}


def _listing(topics: Mapping[str, str], width: int) -> list[str]:
    """Return each name with the first sentence of its section."""
    lines, indent = [], " " * (2 + max(map(len, topics)))
    for name, text in topics.items():
        cause = " ".join(text.removeprefix("**Cause.** ").split()).replace("`", "")
        first = f"{name:{len(indent)}}{re.split(r'[.:] ', cause)[0].rstrip('.')}"
        lines += textwrap.wrap(first, width, subsequent_indent=indent)
    return lines


def _list(width: int) -> str:
    lines: list[str] = []
    for path in sorted(path for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix in WRITTEN):
        lines.append(path.relative_to(EXAMPLES).as_posix())
        lines += textwrap.wrap(_summary(path), width, initial_indent=" " * 4, subsequent_indent=" " * 4)
    end = "`zerodrift examples --copy` copies them to `examples`."
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
    """Copy the examples. Paths of examples become those of the copies, and other paths absolute."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ZerodriftError(folder, "must be an empty folder, or not exist", got="something else")
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    place, copied = folder.as_posix().rstrip("/"), [path for path in folder.rglob("*") if path.is_file()]
    module = "examples" if folder.is_absolute() else place.replace("/", ".")
    adapted = {"examples/": f"{place}/", "examples.jobs.": f"{module}.jobs."}
    adapted |= {"train: docs/": f"train: {DOCS}/", "train: src/zerodrift": f"train: {DOCS.parent}"}
    for path in copied:
        if path.suffix in WRITTEN:
            text = path.read_text(encoding="utf-8")
            for written, instead in adapted.items():
                text = text.replace(written, instead)
            path.write_text(text, encoding="utf-8")
    command = f"zerodrift train {place}/jobs/lab.yaml --nproc 2"
    return f"{len(copied)} files in {legible(str(folder))}. Start with:\n  {command}\n"
