"""Read token ids and recorded log-probabilities from files, and make micro-batches of them.

Ids are one integer tensor, a list of ids, or a list of such lists. Recorded log-probabilities have a number
for every token except the first, or for every token with null for the first. Any other null was not recorded.

Invariant: returned values are checked. An error names the sequence and the place in it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zerodrift.errors import ModelError, first_line, said
from zerodrift.files import opened
from zerodrift.model import inputs_for

Batch = Mapping[str, Any]  # keyword arguments of the model

Ids = list[list[int]]

Recorded = list[list[float | None]]
"""Log-probabilities of each sequence from its second token on, with None if nothing was recorded."""

_TENSORS = (".npy", ".pt", ".safetensors")
_TEXTS = (".json", ".jsonl")
_TOKEN_KEYS = ("tokens", "token_ids", "input_ids", "ids")
_LOGPROB_KEYS = ("logprobs", "log_probs", "prompt_logprobs", "token_logprobs", "input_token_logprobs")


def read_batches(path: Path, count: int, rank: int, ranks: int) -> list[Batch]:
    """Make `count` micro-batches for this rank from the sequences of a file. Sequences are cut to the
    shortest of their micro-batch."""
    sequences = read_ids(path)
    if len(sequences) < count * ranks:
        must = f"must have a sequence for each of {count * ranks} micro-batches"
        do = f"Give `--batches {len(sequences) // ranks}`."
        raise ModelError(str(path), must, got=len(sequences), do=do)
    mine = sequences[rank::ranks]
    each = len(mine) // count
    batches: list[Batch] = []
    for start in range(0, each * count, each):
        part = mine[start : start + each]
        ids = torch.tensor([sequence[: min(map(len, part))] for sequence in part])
        batches.append({"input_ids": ids, "labels": ids})
    return batches


def draw_batches(model: nn.Module, count: int, rank: int) -> list[Batch]:
    """Draw two sequences of 64 random tokens per micro-batch, or use example inputs if a model takes none."""
    example = inputs_for(model)
    tokens = example.kwargs.get("input_ids")
    if tokens is None or example.args:
        return [dict(example.kwargs) for _ in range(count)]
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", 0) or int(tokens.max()) + 1)
    length = min(64, int(getattr(text, "max_position_embeddings", 64) or 64))
    made: list[Batch] = []
    for number in range(count):
        generator = torch.Generator().manual_seed(1_000 * rank + number)
        ids = torch.randint(0, vocabulary, (2, length), generator=generator, device="cpu")
        labels = {"labels": ids} if "labels" in example.kwargs else {}
        made.append({**example.kwargs, "input_ids": ids, **labels})
    return made


def read_ids(path: Path) -> Ids:
    return parse_ids(_read_tensor(path) if path.suffix in _TENSORS else _read_json(path), str(path))


def parse_ids(rows: Any, where: str = "tokens") -> Ids:
    rows = rows.tolist() if hasattr(rows, "tolist") else rows
    if isinstance(rows, dict) or (isinstance(rows, list) and rows and all(map(_is_id, rows))):
        rows = [rows]
    if not isinstance(rows, list) or not rows:
        raise ModelError(where, "must hold sequences of token ids", got=_kind(rows))
    rows = [_value(row, _TOKEN_KEYS) for row in rows]
    for number, row in enumerate(rows):
        if not isinstance(row, list) or not all(map(_is_id, row)):
            raise ModelError(f"{where}[{number}]", "must be a list of token ids", got=_kind(row))
        if len(row) < 2:
            must = "must be at least two tokens: the first has no log-probability"
            raise ModelError(f"{where}[{number}]", must, got=len(row))
    return rows


def require_vocabulary(sequences: Ids, vocabulary: int) -> None:
    """Refuse ids beyond the model's vocabulary."""
    for number, row in enumerate(sequences):
        for place, item in enumerate(row):
            if not 0 <= item < vocabulary:
                must = f"must be a token of the model, from 0 to {vocabulary - 1:,}"
                do = "Take the tokens of the tokenizer that the model was trained with."
                raise ModelError(f"tokens[{number}][{place}]", must, got=item, do=do)


def read_recorded(path: Path, sequences: Ids) -> Recorded:
    return parse_recorded(_read_json(path), sequences, str(path))


def parse_recorded(rows: Any, sequences: Ids, where: str = "recorded") -> Recorded:
    """Parse lists of log-probabilities, one for each sequence."""
    rows = rows.tolist() if hasattr(rows, "tolist") else rows
    if isinstance(rows, dict) or (isinstance(rows, list) and rows and not isinstance(rows[0], (list, dict))):
        rows = [rows]
    if not isinstance(rows, list):
        raise ModelError(where, "must hold log-probabilities of sequences", got=_kind(rows))
    if len(rows) != len(sequences):
        raise ModelError(where, f"must have {len(sequences):,} sequences, as the tokens", got=len(rows))
    pairs = enumerate(zip(rows, sequences, strict=True))
    return [_logprobs(row, sequence, f"{where}[{number}]") for number, (row, sequence) in pairs]


def _logprobs(row: Any, sequence: list[int], where: str) -> list[float | None]:
    if isinstance(row, dict) and _value(row, _TOKEN_KEYS) not in (row, sequence):
        raise ModelError(where, "must be of the tokens that are compared", got="others beside them")
    row, length = _value(row, _LOGPROB_KEYS), len(sequence)
    if isinstance(row, list) and len(row) in (length, length - 1):
        row = [_logprob(item, token) for item, token in zip(row, sequence[length - len(row) :], strict=True)]
    if not isinstance(row, list) or not all(
        item is None or _is_id(item) or isinstance(item, float) for item in row
    ):
        raise ModelError(where, "must be a list of numbers or null", got=_kind(row))
    if len(row) == length and row[0] is None:
        row = row[1:]
    if len(row) != length - 1:
        must = f"must have {length - 1:,} log-probabilities: one for every token but the first"
        do = "One for each token will do, too, if the first is null."
        raise ModelError(where, must, got=len(row), do=do)
    for place, item in enumerate(row, 1):
        if item is not None and not (math.isfinite(item) and item <= 1e-3):
            raise ModelError(f"{where}[{place}]", "must be a finite log-probability, 0 or below", got=item)
    if all(item is None for item in row):
        raise ModelError(where, "must have a log-probability", got="null for every token")
    return [None if item is None else float(item) for item in row]


def _logprob(item: Any, token: int) -> Any:
    """Return the number of an entry of vLLM, `{"17": {"logprob": -0.5}}`, or SGLang, `[-0.5, 17, null]`."""
    if isinstance(item, dict):
        item = item.get(str(token), item.get("logprob", item))
        return item.get("logprob", item) if isinstance(item, dict) else item
    return item[0] if isinstance(item, list) and len(item) >= 2 and item[1] == token else item


def _read_json(path: Path) -> Any:
    if path.suffix not in _TEXTS:
        raise ModelError(path, f"must end in {', '.join((*_TENSORS, *_TEXTS))}", got=repr(path.name))
    try:
        text = _read(path).decode("utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ModelError(path, "must be JSON", got=first_line(error)) from None


def _read_tensor(path: Path) -> torch.Tensor:
    found: Any
    data = io.BytesIO(_read(path))
    try:
        if path.suffix == ".npy":
            found = torch.from_numpy(np.load(data, allow_pickle=False).astype(np.int64, casting="safe"))
        elif path.suffix == ".pt":
            found = torch.load(data, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load

            found = load(data.getvalue())
    except Exception as error:
        raise ModelError(path, "must hold a tensor of token ids", got=said(error)) from None
    if isinstance(found, dict):
        named = [found[name] for name in _TOKEN_KEYS if name in found] or list(found.values())
        found = named[0] if len(named) == 1 else found
    if not isinstance(found, torch.Tensor) or found.is_floating_point() or found.dim() not in (1, 2):
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else _kind(found)
        raise ModelError(path, "must hold one tensor of token ids, `[sequences, tokens]`", got=got)
    return found


def _read(path: Path) -> bytes:
    try:
        with opened(path) as file:
            return file.read()
    except OSError as error:
        raise ModelError(path, "must be a file that can be read", got=error.strerror or error) from None


def _value(row: Any, keys: Sequence[str]) -> Any:
    """Return the value of an object under the first of these keys that it has, or else what was given."""
    return next((row[key] for key in keys if key in row), row) if isinstance(row, dict) else row


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"an object with {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)[:80]
