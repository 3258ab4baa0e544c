"""Writes what is generated in README.md and docs: key tables, the support table, the output of commands.

    python docs/refresh.py            # or: make docs

A block of language `console` whose first line is `$ zerodrift ...` gets what that command prints. A comment
right above the block, `<!-- shown: until decisions -->`, shows a part of it: `from WORD` starts at the first
line that begins with WORD, `until WORD` stops before it. Nobody edits such a block by hand, and
`tests/unit/test_docs.py` fails where one is stale.

Invariant: a second run changes nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from zerodrift.cli import app
from zerodrift.config.reference import render_config, render_page
from zerodrift.policy.support import states, table
from zerodrift.report.support import support_markdown
from zerodrift.train.reference import render_job

ROOT = Path(__file__).resolve().parents[1]

BLOCK = re.compile(
    r"(?P<head>(?:<!-- shown: (?P<part>[^\n]*?) -->\n)?```console\n\$ (?P<command>zerodrift [^\n]*)\n)"
    r"(?P<output>.*?)```\n",
    re.DOTALL,
)


def pages() -> list[Path]:
    """Every page of the repository that a person wrote."""
    written = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
    return sorted(page for page in written if page.name not in generated())


def generated() -> dict[str, str]:
    """Name of a page in docs -> its text, for those that are generated as a whole."""
    return {
        "config.md": render_config(),
        "job.md": render_job(),
        "deepspeed.md": render_page(),
        "support.md": support_markdown(table(), states()),
    }


def fresh(text: str) -> str:
    """A page with the output of its commands below them."""
    return BLOCK.sub(lambda m: f"{m['head']}{part(output(m['command']), m['part'] or '')}```\n", text)


def output(command: str) -> str:
    """What a command prints, run here and not in a process of its own: transformers is imported once."""
    printed = io.StringIO()
    # Paths in commands are those of a person at the root of the repository.
    with _at_root(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        app(shlex.split(command, comments=True)[1:], standalone_mode=False)
    return printed.getvalue()


@contextlib.contextmanager
def _at_root() -> Iterator[None]:
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


def part(text: str, shown: str) -> str:
    """The lines that `from WORD until WORD` names."""
    lines = text.splitlines()
    words = shown.split()
    for keyword, word in zip(words[::2], words[1::2], strict=True):
        place = next(number for number, line in enumerate(lines) if line.startswith(word))
        lines = lines[place:] if keyword == "from" else lines[:place]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    for name, text in generated().items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
    for page in pages():
        page.write_text(fresh(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
