"""Token ids and recorded log-probabilities out of files.

Ids are sequences of equal or different lengths: `.npy`, `.pt`, `.safetensors` (one tensor of whole numbers,
`[tokens]` or `[sequences, tokens]`), `.json` (a list of ids, or of lists), `.jsonl` (a list a line, or an
object with `tokens`). Recorded log-probabilities have one number for every token but the first of a sequence,
or one for each, the first of which is null; a null elsewhere was not recorded.

Invariant: what is returned is whole and finite; what is not is named by its sequence and its place in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerodrift.errors import ModelError, first_line, said
from zerodrift.files import opened

Ids = list[list[int]]
"""Of each sequence."""

Recorded = list[list[float | None]]
"""Of each sequence, of its tokens from the second on; None where nothing was recorded."""

KINDS = (".npy", ".pt", ".safetensors", ".json", ".jsonl")
_OF_TOKENS = ("tokens", "token_ids", "input_ids", "ids")
_OF_LOGPROBS = ("logprobs", "log_probs", "prompt_logprobs", "token_logprobs", "input_token_logprobs")


def read_ids(path: Path) -> Ids:
    """The sequences of a file."""
    rows = _tensor(path).tolist() if path.suffix in (".npy", ".pt", ".safetensors") else _json(path)
    return ids(rows, str(path))


def ids(rows: Any, where: str = "tokens") -> Ids:
    """The same from what Python has: a tensor, a list of ids, a list of lists."""
    rows = rows.tolist() if hasattr(rows, "tolist") else rows
    if isinstance(rows, dict):
        rows = [rows]
    if isinstance(rows, list) and rows and all(_is_id(item) for item in rows):
        rows = [rows]
    if not isinstance(rows, list) or not rows:
        raise ModelError(where, "must hold sequences of token ids", got=_kind(rows))
    found = []
    for number, row in enumerate(rows):
        row = _of(row, _OF_TOKENS)
        if not isinstance(row, list) or not all(_is_id(item) for item in row):
            raise ModelError(f"{where}[{number}]", "must be a list of token ids", got=_kind(row))
        if len(row) < 2:
            must = "must be at least two tokens: the first has no log-probability"
            raise ModelError(f"{where}[{number}]", must, got=len(row))
        found.append(row)
    return found


def require_vocabulary(sequences: Ids, vocabulary: int, where: str = "tokens") -> None:
    """Every id must be one of the model's."""
    for number, row in enumerate(sequences):
        for place, item in enumerate(row):
            if not 0 <= item < vocabulary:
                must = f"must be a token of the model, from 0 to {vocabulary - 1:,}"
                raise ModelError(f"{where}[{number}][{place}]", must, got=item, do=_TOKENIZER)


_TOKENIZER = "Take the tokens of the tokenizer that the model was trained with."


def read_recorded(path: Path, sequences: Ids) -> Recorded:
    """The log-probabilities of a file, one sequence for each of the ids."""
    return recorded(_json(path), sequences, str(path))


def recorded(rows: Any, sequences: Ids, where: str = "recorded") -> Recorded:
    """The same from lists."""
    rows = rows.tolist() if hasattr(rows, "tolist") else rows
    if isinstance(rows, dict) or (isinstance(rows, list) and rows and not isinstance(rows[0], (list, dict))):
        rows = [rows]
    if not isinstance(rows, list):
        raise ModelError(where, "must hold log-probabilities of sequences", got=_kind(rows))
    if len(rows) != len(sequences):
        raise ModelError(where, f"must have {len(sequences):,} sequences, as the tokens", got=len(rows))
    return [
        _logprobs(row, sequence, f"{where}[{number}]")
        for number, (row, sequence) in enumerate(zip(rows, sequences, strict=True))
    ]


def _logprobs(row: Any, sequence: list[int], where: str) -> list[float | None]:
    if isinstance(row, dict) and (own := _of(row, _OF_TOKENS)) is not row and own != sequence:
        raise ModelError(where, "must be of the tokens that are compared", got="others beside them")
    row = _of(row, _OF_LOGPROBS)
    if isinstance(row, list) and len(row) in (len(sequence), len(sequence) - 1):
        tokens = sequence[len(sequence) - len(row) :]
        row = [_of_token(item, token) for item, token in zip(row, tokens, strict=True)]
    if not isinstance(row, list) or not all(item is None or _is_number(item) for item in row):
        raise ModelError(where, "must be a list of numbers or null", got=_kind(row))
    if len(row) == len(sequence) and row[0] is None:
        row = row[1:]
    if len(row) != len(sequence) - 1:
        must = f"must have {len(sequence) - 1:,} log-probabilities: one for every token but the first"
        do = "One for each token will do, too, if the first is null."
        raise ModelError(where, must, got=len(row), do=do)
    for place, item in enumerate(row, 1):
        if item is not None and not (math.isfinite(item) and item <= 1e-3):
            raise ModelError(f"{where}[{place}]", "must be a finite log-probability, 0 or below", got=item)
    if all(item is None for item in row):
        raise ModelError(where, "must have a log-probability", got="null for every token")
    return [None if item is None else float(item) for item in row]


def _of_token(item: Any, token: int) -> Any:
    """The number in an entry of vLLM, `{"17": {"logprob": -0.5}}`, or of SGLang, `[-0.5, 17, null]`."""
    if isinstance(item, dict):
        item = item.get(str(token), item.get("logprob", item))
        return item.get("logprob", item) if isinstance(item, dict) else item
    if isinstance(item, list) and len(item) >= 2 and item[1] == token:
        return item[0]
    return item


# --- files ----------------------------------------------------------------------------------------------


def _json(path: Path) -> Any:
    if path.suffix not in (".json", ".jsonl"):
        raise ModelError(path, f"must end in {', '.join(KINDS)}", got=repr(path.name))
    try:
        with opened(path) as file:
            text = file.read().decode("utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        return list(_lines(text))
    except OSError as error:
        raise ModelError(path, "must be a file that can be read", got=error.strerror or error) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(path, "must be JSON", got=first_line(error)) from None


def _lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)


def _tensor(path: Path) -> torch.Tensor:
    try:
        with opened(path) as file:
            if path.suffix == ".npy":
                found: Any = torch.from_numpy(
                    np.load(file, allow_pickle=False).astype(np.int64, casting="safe")
                )
            elif path.suffix == ".pt":
                found = torch.load(file, map_location="cpu", weights_only=True)
            else:
                from safetensors.torch import load

                found = load(file.read())
    except OSError as error:
        raise ModelError(path, "must be a file that can be read", got=error.strerror or error) from None
    except Exception as error:
        raise ModelError(path, "must hold a tensor of token ids", got=said(error)) from None
    if isinstance(found, dict):
        named = [found[name] for name in _OF_TOKENS if name in found] or list(found.values())
        found = named[0] if len(named) == 1 else found
    if not isinstance(found, torch.Tensor) or found.is_floating_point() or found.dim() not in (1, 2):
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else _kind(found)
        raise ModelError(path, "must hold one tensor of token ids, `[sequences, tokens]`", got=got)
    return found


def _of(row: Any, keys: Sequence[str]) -> Any:
    """What an object has under one of the keys; anything else as it is."""
    return next((row[key] for key in keys if key in row), row) if isinstance(row, dict) else row


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"an object with {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)[:80]
