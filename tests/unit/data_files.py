"""Files of data, the blocks that are prepared of them, and a rank's place in a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift.train.data.blocks import Blocks
from zerodrift.train.data.prepare import PreparedData, prepare
from zerodrift.train.data.sampling import BatchLayout
from zerodrift.train.data.tokenizer import ByteTokenizer
from zerodrift.train.job import Data

TEXTS = ["first document", "zweites Dokument mit Übung", "third", "the fourth one is longer than the others"]
ROWS = [{"text": text} for text in TEXTS]
TALK = [
    {"role": role, "content": text}
    for role, text in (("user", "Hi"), ("assistant", "Yo"), ("user", "More"), ("assistant", "No"))
]


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tree(folder: Path, files: dict[str, str | bytes | list[dict[str, Any]]]) -> Path:
    """Write files into a folder and below, by name: texts, bytes or rows of JSON lines."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            jsonl(file, content)
        else:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def arrow_stream(rows: list[dict[str, Any]], size: int | None = None) -> bytes:
    """Return a stream of Arrow, in batches of `size` rows."""
    arrow = pytest.importorskip("pyarrow")
    table, sink = arrow.Table.from_pylist(rows), arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=size):
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def parquet(table: Any, **rest: Any) -> bytes:
    """Return a file of parquet, of rows or of a table."""
    arrow, written = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = arrow.BufferOutputStream()
    written.write_table(arrow.Table.from_pylist(table) if isinstance(table, list) else table, sink, **rest)
    return bytes(sink.getvalue().to_pybytes())


def data(path: Path, **rest: Any) -> Data:
    return Data(**{"train": str(path), "block": 16, **rest})


def made(folder: Path, written: Data) -> PreparedData:
    return prepare(written, ByteTokenizer(), folder / "cache")


def stream(blocks: Blocks) -> np.ndarray:
    """Return the tokens of all blocks."""
    return blocks.read(np.arange(len(blocks))).tokens.reshape(-1)


def parts_of(blocks: Blocks, *at: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels of blocks."""
    read = blocks.read(np.array(at))
    return read.tokens, read.labels


def layout(micro: int, rank: int = 0, ranks: int = 1, accumulation: int = 1) -> BatchLayout:
    """Return the micro-batches of a rank, dealt in turns."""
    numbers = tuple(range(rank, accumulation * ranks, ranks))
    return BatchLayout(rank, ranks, micro, numbers, torch.device("cpu"))
