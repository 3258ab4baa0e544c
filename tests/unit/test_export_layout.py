"""The layout of exported folders, and writing into it run by run: arithmetic, and files on one disk."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, NonFiniteError
from zerodrift.io.safetensors.files import Written, boxes, index_text, overlap, pack, size_in_bytes
from zerodrift.io.safetensors.saving import Block, Laid, plain, strides_of
from zerodrift.io.safetensors.writer import Sink
from zerodrift.model.safetensors import stored


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 1, 3), (2, 3, 4), (2, 2, 2, 2)])
def test_boxes_are_the_run_in_its_order(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    numbers = torch.arange(count).view(shape)
    for start, stop in itertools.combinations(range(count + 1), 2):
        found = list(boxes(start, stop, shape))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        parts = []
        for box in found:
            assert box.offset == sum(len(part) for part in parts)
            place = tuple(slice(low, low + n) for low, n in zip(box.low, box.shape, strict=True))
            parts.append(numbers[place].flatten().tolist())
        assert list(itertools.chain(*parts)) == list(range(start, stop))


def test_an_empty_run_has_no_box() -> None:
    assert list(boxes(3, 3, (4, 4))) == [] and list(boxes(0, 0, (0, 4))) == []


def test_overlap() -> None:
    box = next(iter(boxes(0, 12, (3, 4))))
    assert overlap(box, (1, 2), (5, 5)) == ((1, 2), (2, 2))
    assert overlap(box, (3, 0), (1, 4)) is None


def written(name: str, *shape: int, dtype: DType = DType.FP32) -> Written:
    return Written(plain(name, shape), dtype)


def test_files_are_cut_as_the_hub_cuts_them(tmp_path: Path) -> None:
    """The same names, files and index as huggingface_hub makes of the same tensors."""
    hub = pytest.importorskip("huggingface_hub")
    shapes = {"a": (10,), "b": (50,), "c": (3, 3), "d": (2,), "e": (100,), "f": (1,), "g": ()}
    ours = pack([written(name, *shape) for name, shape in shapes.items()], 200)
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    pattern = "model{suffix}.safetensors"
    theirs = hub.split_torch_state_dict_into_shards(state, max_shard_size=200, filename_pattern=pattern)
    found = {tensor.laid.name: file.name for file in ours for tensor in file.tensors}
    assert {n: sorted(k for k in found if found[k] == n) for n in found.values()} == {
        name: sorted(tensors) for name, tensors in theirs.filename_to_tensors.items()
    }
    index = json.loads(index_text(ours))
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == theirs.metadata["total_size"]


def test_one_file_needs_no_index() -> None:
    (file,) = pack([written("a", 3), written("b", 3, dtype=DType.BF16)], 10**9)
    assert file.name == "model.safetensors"
    assert file.size == len(file.header) + 12 + 6


def test_tensors_are_aligned() -> None:
    kinds = (DType.BF16, DType.INT8, DType.FP32, DType.INT64, DType.BF16)
    (file,) = pack([written(f"t{i}", 3, dtype=dtype) for i, dtype in enumerate(kinds)], 10**9)
    assert [start % tensor.dtype.size for start, tensor in zip(file.starts, file.tensors, strict=True)] == [
        0
    ] * 5


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1.5KiB", 1536), (7, 7), ("20kb", 20000)]
)
def test_sizes(text: int | str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5 XB", "-1", "0", "GB", "nan"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        size_in_bytes(text)


# --- writing ----------------------------------------------------------------------------------------------


def pour(folder: Path, laid: list[Laid], values: dict[str, torch.Tensor], step: int, **dtypes: DType) -> None:
    """Write parameters in runs of `step` elements, backwards."""
    tensors = [Written(tensor, dtypes.get(tensor.name.split(".")[0], DType.FP32)) for tensor in laid]
    files = pack(tensors, 400)
    sink = Sink(folder, files)
    sink.create()
    for name, value in values.items():
        flat = value.reshape(-1)
        for start in reversed(range(0, flat.numel(), step)):
            sink.write(name, tuple(value.shape), start, flat[start : start + step])
    sink.close()
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(index_text(files))


def read(folder: Path) -> dict[str, torch.Tensor]:
    stored(folder)  # our own reader of headers checks tiling and index
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("step", [1, 5, 64, 1000])
def test_runs_of_any_length(tmp_path: Path, step: int) -> None:
    values = {"a": torch.randn(7, 9), "b": torch.randn(()), "c": torch.randn(3, 2, 5), "d": torch.zeros(0, 4)}
    pour(tmp_path, [plain(name, tuple(v.shape)) for name, v in values.items()], values, step, a=DType.BF16)
    found = read(tmp_path)
    assert found.keys() == values.keys()
    assert torch.equal(found["a"], values["a"].bfloat16())
    for name in "bcd":
        assert torch.equal(found[name], values[name])


@pytest.mark.parametrize("step", [1, 7, 50, 1000])
def test_blocks_that_are_experts_halves_and_transposed(tmp_path: Path, step: int) -> None:
    """[4 experts, 6 rows of gate and up, 5] as eight tensors, two of them transposed."""
    value = torch.randn(4, 6, 5)
    laid, expected = [], {}
    for expert, half in itertools.product(range(4), range(2)):
        name = f"{expert}.{'gate' if half == 0 else 'up'}"
        part = value[expert, 3 * half : 3 * half + 3]
        if expert == 2:
            block = Block("p", (expert, 3 * half, 0), (1, 3, 5), 0, (0, 1, 3))
            laid.append(Laid(name, (5, 3), (block,)))
            expected[name] = part.T.contiguous()
        else:
            block = Block("p", (expert, 3 * half, 0), (1, 3, 5), 0, (0, 5, 1))
            laid.append(Laid(name, (3, 5), (block,)))
            expected[name] = part
    pour(tmp_path, laid, {"p": value}, step)
    found = read(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_tensor_of_two_parameters(tmp_path: Path) -> None:
    q, k = torch.randn(4, 3), torch.randn(2, 3)
    blocks = (Block("q", (0, 0), (4, 3), 0, (3, 1)), Block("k", (0, 0), (2, 3), 12, (3, 1)))
    pour(tmp_path, [Laid("qk", (6, 3), blocks)], {"q": q, "k": k}, 5)
    assert torch.equal(read(tmp_path)["qk"], torch.cat([q, k]))


def test_long_rows_far_apart(tmp_path: Path) -> None:
    """Rows beyond the size from which each has a call of its own."""
    value = torch.randn(6, 2048)
    block = Block("p", (0, 0), (6, 2048), 2048, (4096, 1))
    other = Block("o", (0, 0), (6, 2048), 0, (4096, 1))
    laid = Laid("t", (12, 2048), (block, other))
    pour(tmp_path, [laid], {"p": value, "o": -value}, 3000)
    found = read(tmp_path)["t"]
    assert torch.equal(found[1::2], value) and torch.equal(found[::2], -value)


def test_what_does_not_fit_fp16_is_named(tmp_path: Path) -> None:
    values = {"a": torch.tensor([1.0, 7e4])}
    with pytest.raises(NonFiniteError, match=r"`a`: must fit into fp16.*70000"):
        pour(tmp_path, [plain("a", (2,))], values, 10, a=DType.FP16)
    infinite = {"a": torch.tensor([1.0, float("inf")])}
    pour(tmp_path, [plain("a", (2,))], infinite, 10, a=DType.FP16)


def test_space_is_taken_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sink = Sink(tmp_path, pack([written("a", 8)], 100))
    with pytest.raises(OSError, match="No space"):
        sink.create()


def test_strides() -> None:
    assert strides_of((2, 3, 4)) == (12, 4, 1) and strides_of(()) == ()


def test_metadata_says_pt(tmp_path: Path) -> None:
    pour(tmp_path, [plain("a", (2,))], {"a": torch.ones(2)}, 10)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
