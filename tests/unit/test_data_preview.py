"""`zerodrift data` prints a summary of the data, and samples with their learned tokens marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.unit.data_files import jsonl
from zerodrift.errors import ConfigError, ModelError
from zerodrift.train.job_file import read_job
from zerodrift.train.report.summary import preview

ROWS: list[dict[str, Any]] = [
    *({"id": n, "prompt": f"{n}: 你好 \x1b[31m" + "?" * n, "completion": "Antwort.\n" * 3} for n in range(9)),
    {"id": 9, "messages": [{"role": "user", "content": "nobody answers"}]},
    {"id": 10, "prompt": "x" * 300, "completion": "never seen"},
]


def preview_of(folder: Path, color: bool = False, width: int = 80, **data: Any) -> str:
    file = jsonl(folder / "a.jsonl", ROWS)
    written = {"train": str(file), "block": 128, "validation": 0.2, "seed": 2, "format": "chat", **data}
    job, _ = read_job({"model": {"source": "a:b"}, "data": written, "run": {"folder": str(folder / "run")}})
    return preview(job, color=color, width=width)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_fits_the_screen_and_says_what_was_read(width: int, tmp_path: Path) -> None:
    text = preview_of(tmp_path, width=width)
    assert max(map(cell_len, text.split("\n"))) <= max(width, 40)
    words = " ".join(text.split())
    assert "1 file, 11 conversations" in words and "`prompt` and `completion` (10)" in words
    assert "1 conversation without a turn of the assistant to learn" in words
    assert "1 block with nothing to learn" in words and "columns `id`" in words
    assert "held out" in words and text.count("\nblock ") == 3


def test_what_is_learned_is_marked_with_and_without_colour(tmp_path: Path) -> None:
    plain = preview_of(tmp_path)
    assert plain.count("  [[Antwort.\n  Antwort.\n  Antwort.\n  <end>]]\n") == 3
    assert "\x1b" not in plain and r"\x1b[31m" in plain, "what is in data does not rule a terminal"
    colored = preview_of(tmp_path, color=True)
    assert "\x1b[32m[[Antwort." in colored
    packed = preview_of(tmp_path, pack=True, attend="document", block=512)
    assert "--- another document ---" in packed and "[[Antwort." in packed


def test_what_is_wrong_with_a_job_is_told_here_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "bert", "hidden_size": 8, "num_attention_heads": 1}')
    for source, run, words in (
        (str(config), {}, "an encoder"),
        ("a:b", {"evaluate_every": 2}, "must go with data"),
    ):
        job, _ = read_job({"model": {"source": source}, "data": {"train": "x"}, "run": run})
        with pytest.raises((ConfigError, ModelError), match=words):
            preview(job, color=False, width=80)
