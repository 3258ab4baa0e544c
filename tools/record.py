"""Record a command in a terminal as an animated SVG file of text.

    python tools/record.py docs/img/demo.svg --width 100 --height 34 -- make demo

The command gets a terminal of that size; what its screen shows is taken `--frames` times at most, evenly
over the changes, and replayed in `--seconds`. A row that several pictures share is in the file once. Needs
`pip install pyte`, a terminal emulator.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte

COLORS = {
    "default": "#d4d7dd",
    "black": "#3b4048",
    "red": "#e5737d",
    "green": "#93c47d",
    "brown": "#dcb86a",
    "blue": "#6aa5e8",
    "magenta": "#c58be0",
    "cyan": "#5fc0c4",
    "white": "#d4d7dd",
    "brightblack": "#7b828e",
}
BACKGROUND = "#181b20"
FONTS = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
ADVANCE, LEADING, SIZE = 8.4, 18, 14
"""Pixels: of a letter, of a row, of the type."""

Row = tuple[tuple[str, str, bool], ...]
"""Runs of (text, colour, bold)."""
Picture = tuple[Row, ...]


def record(command: list[str], width: int, height: int) -> list[tuple[float, Picture]]:
    """Return (seconds since the start, screen) at every change, with the command's exit in the last."""
    screen = pyte.Screen(width, height)
    stream = pyte.ByteStream(screen)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(width), "LINES": str(height)}
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    begin, taken = time.monotonic(), []
    while True:
        try:
            arrived = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not arrived:
            break
        sys.stdout.buffer.write(arrived)
        sys.stdout.flush()
        stream.feed(arrived)
        taken.append((time.monotonic() - begin, picture(screen)))
    if process.wait():
        raise SystemExit(f"`{' '.join(command)}` ended with {process.returncode}")
    return taken


def picture(screen: Any) -> Picture:
    return tuple(row(screen.buffer[line], screen.columns) for line in range(screen.lines))


def row(cells: Any, columns: int) -> Row:
    """Return the runs of a line without trailing blanks."""
    last = max((n for n in range(columns) if cells[n].data.strip()), default=-1)

    def look(number: int) -> tuple[str, bool]:
        cell = cells[number]
        return (cell.bg if cell.reverse else cell.fg), cell.bold

    runs = []
    for (color, bold), numbers in groupby(range(last + 1), look):
        runs.append(("".join(cells[n].data for n in numbers), color, bold))
    return tuple(runs)


def thin(taken: list[tuple[float, Picture]], frames: int) -> list[tuple[float, Picture]]:
    """Return at most `frames` of the pictures, evenly spaced, with the last among them."""
    changed = [
        after for before, after in zip([(0.0, ()), *taken], taken, strict=False) if before[1] != after[1]
    ]
    if frames == 1:
        return changed[-1:]
    *before_last, last = changed
    step = max(1, -(-len(before_last) // (frames - 1)))
    return [*before_last[::step], last]


def svg(taken: list[tuple[float, Picture]], width: int, height: int, seconds: float) -> str:
    """Return one group per picture, shown one after the other, and then the last for a while."""
    total = seconds * 1.3
    pace = seconds / max(1e-9, taken[-1][0] - taken[0][0]) / total * 100
    at = [*((when - taken[0][0]) * pace for when, _ in taken), 100.0]
    """Percent of the whole at which each picture begins."""
    rows: dict[Row, str] = {}
    groups, styles = [], []
    for number, (_, shown) in enumerate(taken):
        start, stop, last = at[number], at[number + 1], number + 1 == len(taken)
        before = f"0%,{start:.3f}%{{opacity:0}}" if number else ""
        after = "100%{opacity:1}" if last else f"{stop:.3f}%,100%{{opacity:0}}"
        styles.append(f"@keyframes f{number}{{{before}{start:.3f}%,{stop:.3f}%{{opacity:1}}{after}}}")
        uses = []
        for line, content in enumerate(shown):
            if content:
                name = rows.setdefault(content, f"r{len(rows)}")
                uses.append(f'<use href="#{name}" y="{line * LEADING}"/>')
        animation = f"animation:f{number} {total:.1f}s step-end infinite"
        groups.append(f'<g style="opacity:{int(last)};{animation}">{"".join(uses)}</g>')
    w, h = round(width * ADVANCE + 32), height * LEADING + 32
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}">',
        f"<style>text{{font:{SIZE}px {FONTS};white-space:pre}}",
        *styles,
        f"</style><defs>{''.join(draw_row(name, content) for content, name in rows.items())}</defs>",
        f'<rect width="{w}" height="{h}" rx="8" fill="{BACKGROUND}"/><g transform="translate(16 16)">',
        *groups,
        "</g></svg>\n",
    ]
    return "\n".join(parts)


def draw_row(name: str, content: Row) -> str:
    """Draw a row; every run has its position and length, for any font."""
    spans, column = [], 0
    for text, color, bold in content:
        fill = COLORS.get(color, f"#{color}" if len(color) == 6 else COLORS["default"])
        weight = ' font-weight="bold"' if bold else ""
        spans.append(
            f'<tspan x="{column * ADVANCE:.1f}" textLength="{len(text) * ADVANCE:.1f}" fill="{fill}"{weight}>'
            f"{escape(text)}</tspan>"
        )
        column += len(text)
    return f'<text id="{name}" xml:space="preserve" y="{SIZE}">{"".join(spans)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--height", type=int, default=34)
    parser.add_argument("--frames", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    taken = thin(record(arguments.command, arguments.width, arguments.height), arguments.frames)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(svg(taken, arguments.width, arguments.height, arguments.seconds))
    print(f"{arguments.file}: {len(taken)} pictures, {arguments.file.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
