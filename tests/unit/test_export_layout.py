"""Boxes of rearranged tensors, the layout of exported folders, and writing into it run by run."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, NonFiniteError
from zerodrift.model.safetensors import list_tensors
from zerodrift.weights.boxes import Layout, NotAMoveError, concatenate, within
from zerodrift.weights.conversions import SymbolicTensor
from zerodrift.weights.writer import (
    SafetensorsWriter,
    SavedPart,
    SavedTensor,
    index_text,
    pack,
    size_in_bytes,
)


def by_boxes(layout: Layout, sources: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Return the elements of a range by boxes alone; -1 for a missing one."""
    out = torch.full((math.prod(layout.shape),), -1)
    count = 0
    for box in within(layout.boxes(), start, stop):
        box.of_target(out).copy_(box.of_source(sources[box.number].reshape(-1)))
        count += box.numel
    assert count == stop - start
    return out


def agree(layout: Layout, sources: Sequence[torch.Tensor], want: torch.Tensor, seed: int) -> None:
    assert layout.shape == tuple(want.shape)
    flat, chance = want.reshape(-1), random.Random(seed)
    ranges = [sorted(chance.choices(range(flat.numel() + 1), k=2)) for _ in range(12)]
    for start, stop in ([0, flat.numel()], *ranges):
        out = by_boxes(layout, sources, start, stop)
        assert torch.equal(out[start:stop], flat[start:stop])
        assert bool((out[:start] == -1).all()) and bool((out[stop:] == -1).all())


@pytest.mark.parametrize("seed", range(10))
def test_what_transformers_does_to_weights_is_boxes(seed: int) -> None:
    chance = random.Random(seed)
    experts, rows, columns = chance.randint(1, 4), chance.choice([2, 4, 8]), chance.choice([2, 4, 6])
    sources = [torch.arange(rows * columns).view(rows, columns) + 1000 * n for n in range(2 * experts)]
    layouts = [Layout.of(n, (rows, columns)) for n in range(2 * experts)]
    stacked = [torch.stack(sources[:experts]), torch.stack(sources[experts:])]
    ours = [concatenate([x.unsqueeze(0) for x in part], 0) for part in (layouts[:experts], layouts[experts:])]
    joined, layout = torch.cat(stacked, 1), concatenate(ours, 1)
    agree(layout, sources, joined, seed)
    agree(layout.permute((0, 2, 1)), sources, joined.transpose(1, 2), seed)
    agree(layout.narrow(1, 1, rows), sources, joined.narrow(1, 1, rows), seed)
    agree(layout.narrow(0, experts - 1, 1), sources, joined.narrow(0, experts - 1, 1), seed)
    agree(layout.reshape((experts * 2 * rows, columns)), sources, joined.reshape(-1, columns), seed)
    # Interleaved gate and up, and the order of rows that rotary embeddings want.
    mixed = joined.reshape(experts, rows, 2, columns).transpose(1, 2).reshape(joined.shape)
    moved = layout.reshape((experts, rows, 2, columns)).permute((0, 2, 1, 3)).reshape(layout.shape)
    agree(moved, sources, mixed, seed)
    agree(moved.narrow(1, 1, rows), sources, mixed.narrow(1, 1, rows), seed)
    symbolic = SymbolicTensor.make(layout, torch.float32)
    for index in (slice(1, -1), slice(-3, None), slice(3, 1)):
        agree(symbolic[:, index].elements, sources, joined[:, index], seed)
    with pytest.raises(NotAMoveError, match="a step of 2"):
        symbolic[:, ::2]
    half = rows // 2
    turned = sources[0].view(half, 2, columns).transpose(0, 1).reshape(rows, columns)
    rope = layouts[0].reshape((half, 2, columns)).permute((1, 0, 2)).reshape((rows, columns))
    agree(rope, sources, turned, seed)
    agree(rope.narrow(0, 1, rows - 1), sources, turned.narrow(0, 1, rows - 1), seed)


def test_empty_tensors_and_scalars() -> None:
    assert Layout.of(0, (0, 4)).boxes() == ()
    (scalar,) = Layout.of(0, ()).boxes()
    assert scalar.numel == 1 and list(within([scalar], 0, 1)) == [scalar]
    assert list(within([scalar], 1, 1)) == []


def test_a_view_that_strides_cannot_say_is_refused() -> None:
    joined = concatenate([Layout.of(0, (3,)), Layout.of(1, (3,))], 0)
    with pytest.raises(NotAMoveError):
        joined.reshape((3, 2)).permute((1, 0))


# --- files ------------------------------------------------------------------------------------------


def saved(name: str, *shape: int, dtype: DType = DType.FP32) -> SavedTensor:
    return SavedTensor.of(name, shape, dtype)


def test_files_are_cut_as_the_hub_cuts_them(tmp_path: Path) -> None:
    """Names, files and index are those of huggingface_hub for the same tensors."""
    hub = pytest.importorskip("huggingface_hub")
    shapes = {"a": (10,), "b": (50,), "c": (3, 3), "d": (2,), "e": (100,), "f": (1,), "g": ()}
    ours = pack([saved(name, *shape) for name, shape in shapes.items()], 200)
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    pattern = "model{suffix}.safetensors"
    theirs = hub.split_torch_state_dict_into_shards(state, max_shard_size=200, filename_pattern=pattern)
    found = {tensor.name: file.name for file in ours for tensor in file.tensors}
    assert found == {name: file for file, of in theirs.filename_to_tensors.items() for name in of}
    index = json.loads(index_text(ours))
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == theirs.metadata["total_size"]


def test_one_file_needs_no_index_and_tensors_are_aligned() -> None:
    (file,) = pack([saved("a", 3), saved("b", 3, dtype=DType.BF16)], 10**9)
    assert (file.name, file.size) == ("model.safetensors", len(file.header) + 12 + 6)
    kinds = (DType.BF16, DType.INT8, DType.FP32, DType.INT64, DType.BF16)
    (file,) = pack([saved(f"t{i}", 3, dtype=dtype) for i, dtype in enumerate(kinds)], 10**9)
    assert not any(start % tensor.dtype.size for start, tensor in zip(file.starts, file.tensors, strict=True))


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "500 MB": 5 * 10**8, "1.5KiB": 1536, 7: 7}
    assert {text: size_in_bytes(text) for text in sizes} == sizes
    for text in ("", "5 XB", "0", "nan"):
        with pytest.raises(ConfigError, match="max_shard_size"):
            size_in_bytes(text)


def made_of(name: str, layout: Layout, *parameters: str) -> SavedTensor:
    """Return a tensor of a file with elements of these parameters."""
    parts = tuple(SavedPart(parameters[box.number], box.reversed()) for box in layout.boxes())
    return SavedTensor(name, layout.shape, DType.FP32, parts)


def pour(folder: Path, tensors: list[SavedTensor], values: dict[str, torch.Tensor], step: int) -> None:
    """Write parameters in runs of `step` elements, backwards."""
    files = pack(tensors, 400)
    with SafetensorsWriter.opened(folder, files) as writer:
        writer.create()
        for name, value in values.items():
            flat = value.reshape(-1)
            for start in reversed(range(0, flat.numel(), step)):
                writer.write(name, start, flat[start : start + step])
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(index_text(files))


def read(folder: Path) -> dict[str, torch.Tensor]:
    list_tensors(folder)  # our own reader of headers checks tiling and index
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("step", [7, 1000])
def test_whole_tensors_and_blocks_that_are_experts_halves_and_transposed(tmp_path: Path, step: int) -> None:
    """[4 experts, 6 rows of gate and up, 5] becomes eight tensors, two of them transposed."""
    values = {"a": torch.randn(7, 9), "b": torch.randn(()), "d": torch.zeros(0, 4), "p": torch.randn(4, 6, 5)}
    tensors = [saved(n, *values[n].shape, dtype=DType.BF16 if n == "a" else DType.FP32) for n in "abd"]
    expected = {"a": values["a"].bfloat16(), "b": values["b"], "d": values["d"]}
    whole = Layout.of(0, (4, 6, 5))
    for expert, half in itertools.product(range(4), range(2)):
        name = f"{expert}.{'gate' if half == 0 else 'up'}"
        part = values["p"][expert, 3 * half : 3 * half + 3]
        layout = whole.narrow(0, expert, 1).narrow(1, 3 * half, 3).reshape((3, 5))
        if expert == 2:
            layout, part = layout.permute((1, 0)), part.T
        tensors.append(made_of(name, layout, "p"))
        expected[name] = part.contiguous()
    pour(tmp_path, tensors, values, step)
    found = read(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_tensor_of_two_parameters(tmp_path: Path) -> None:
    """The parameters lie one after the other, or in turns, in rows large enough for their own calls."""
    q, k = torch.randn(4, 3), torch.randn(2, 3)
    layout = concatenate([Layout.of(0, (4, 3)), Layout.of(1, (2, 3))], 0)
    pour(tmp_path, [made_of("qk", layout, "q", "k")], {"q": q, "k": k}, 5)
    assert torch.equal(read(tmp_path)["qk"], torch.cat([q, k]))
    value = torch.randn(6, 2048)
    layout = concatenate([Layout.of(n, (6, 2048)).unsqueeze(1) for n in range(2)], 1).reshape((12, 2048))
    pour(tmp_path, [made_of("t", layout, "o", "p")], {"p": value, "o": -value}, 3000)
    found = read(tmp_path)["t"]
    assert torch.equal(found[1::2], value) and torch.equal(found[::2], -value)


def test_what_does_not_fit_fp16_is_named(tmp_path: Path) -> None:
    values = {"a": torch.tensor([1.0, 7e4])}
    with pytest.raises(NonFiniteError, match=r"`a`: must fit into fp16.*70000"):
        pour(tmp_path, [saved("a", 2, dtype=DType.FP16)], values, 10)
    infinite = {"a": torch.tensor([1.0, float("inf")])}
    pour(tmp_path, [saved("a", 2, dtype=DType.FP16)], infinite, 10)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
