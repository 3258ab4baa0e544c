"""Writes a checkpoint with DeepSeek-V3's shapes out of holes: 671 billion parameters in a few MB.

The headers and the index are real, so anything that reads a checkpoint's layout can be measured at full
size on a laptop. The data region of each shard is only a file size: it reads as zeros and takes no disk
where the file system supports sparse files, and is refused where it does not.

    python bench/deepseek_v3_layout.py FOLDER [--layers 61] [--experts 256] [--shards 163]

Invariant: names, shapes, dtypes and order are those of the published bf16 weights without the extra
layer for multi-token prediction.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from zerodrift.dtypes import DType
from zerodrift.errors import UnsupportedError

HIDDEN = 7168
VOCABULARY = 129280
HEADS = 128
DENSE_LAYERS = 3
DENSE_WIDTH = 18432
EXPERT_WIDTH = 2048
QUERY_RANK, KEY_VALUE_RANK = 1536, 512
NOPE, ROPE, VALUE = 128, 64, 128
"""Size per head of a query and key without and with rotary embedding, and of a value."""

Parameter = tuple[str, tuple[int, ...], DType]


def parameters(*, layers: int = 61, experts: int = 256) -> Iterator[Parameter]:
    """Yield (name, shape, dtype) of every tensor, in the order of the files."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), DType.BF16
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn")
        if layer < DENSE_LAYERS:
            yield from _mlp(f"{prefix}.mlp", DENSE_WIDTH)
        else:
            yield from _experts(f"{prefix}.mlp", experts)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,), DType.BF16
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,), DType.BF16
    yield "model.norm.weight", (HIDDEN,), DType.BF16
    yield "lm_head.weight", (VOCABULARY, HIDDEN), DType.BF16


def _attention(prefix: str) -> Iterator[Parameter]:
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (QUERY_RANK, HIDDEN),
        "q_a_layernorm": (QUERY_RANK,),
        "q_b_proj": (HEADS * (NOPE + ROPE), QUERY_RANK),
        "kv_a_proj_with_mqa": (KEY_VALUE_RANK + ROPE, HIDDEN),
        "kv_a_layernorm": (KEY_VALUE_RANK,),
        "kv_b_proj": (HEADS * (NOPE + VALUE), KEY_VALUE_RANK),
        "o_proj": (HIDDEN, HEADS * VALUE),
    }
    for name, shape in shapes.items():
        yield f"{prefix}.{name}.weight", shape, DType.BF16


def _mlp(prefix: str, width: int) -> Iterator[Parameter]:
    yield f"{prefix}.gate_proj.weight", (width, HIDDEN), DType.BF16
    yield f"{prefix}.up_proj.weight", (width, HIDDEN), DType.BF16
    yield f"{prefix}.down_proj.weight", (HIDDEN, width), DType.BF16


def _experts(prefix: str, experts: int) -> Iterator[Parameter]:
    yield f"{prefix}.gate.weight", (experts, HIDDEN), DType.BF16
    yield f"{prefix}.gate.e_score_correction_bias", (experts,), DType.FP32
    for expert in range(experts):
        yield from _mlp(f"{prefix}.experts.{expert}", EXPERT_WIDTH)
    yield from _mlp(f"{prefix}.shared_experts", EXPERT_WIDTH)


def write(folder: str | os.PathLike[str], *, layers: int = 61, experts: int = 256, shards: int = 163) -> Path:
    """Write the shards and their index, and return the path of the index.

    Shards are filled in order to equal bytes; a model with fewer large tensors than shards gets fewer.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _check_sparse(folder)
    listed = list(parameters(layers=layers, experts=experts))
    parts = _split(listed, shards)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):06}.safetensors"
        _write_shard(folder / name, part)
        weight_map |= {tensor: name for tensor, _, _ in part}
    index = folder / "model.safetensors.index.json"
    total = sum(map(_bytes, listed))
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return index


def _bytes(parameter: Parameter) -> int:
    _, shape, dtype = parameter
    return math.prod(shape) * dtype.size


def _split(listed: list[Parameter], shards: int) -> list[list[Parameter]]:
    total = sum(map(_bytes, listed))
    parts: dict[int, list[Parameter]] = {}
    reached = 0
    for parameter in listed:
        parts.setdefault(reached * shards // total, []).append(parameter)
        reached += _bytes(parameter)
    return list(parts.values())


def _write_shard(path: Path, part: list[Parameter]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for parameter in part:
        name, shape, dtype = parameter
        end = reached + _bytes(parameter)
        header[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [reached, end]}
        reached = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format pads its header with spaces, so that the data begins on a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + reached)


def _check_sparse(folder: Path) -> None:
    """Refuse a file system that would fill the holes: 1.3 TB would be written."""
    probe, size = folder / ".sparse-probe", 16 * 2**20
    try:
        with probe.open("wb") as file:
            file.truncate(size)
        # 512 bytes a block, by POSIX; a system that does not report blocks is taken to have no holes.
        allocated = getattr(probe.stat(), "st_blocks", size) * 512
    except OSError as error:
        raise UnsupportedError(folder, "must hold sparse files", got=error.strerror) from error
    finally:
        probe.unlink(missing_ok=True)
    if allocated >= size:
        raise UnsupportedError(
            folder,
            "must be on a file system with sparse files",
            got=f"{allocated:,} bytes on disk for a hole of {size:,}",
            do="Give a folder on another one.",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--shards", type=int, default=163)
    given = parser.parse_args()
    index = write(given.folder, layers=given.layers, experts=given.experts, shards=given.shards)
    size = sum(math.prod(shape) for _, shape, _ in parameters(layers=given.layers, experts=given.experts))
    print(f"{index}: {size:,} parameters")


if __name__ == "__main__":
    main()
