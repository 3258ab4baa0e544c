"""A ModelSpec of safetensors headers: order, shards, and every kind of broken file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.refusals import error_of
from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.model.safetensors import from_safetensors, natural
from zerodrift.model.spec import OwningModule

Entry = dict[str, Any]


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def pair(second: int) -> dict[str, Entry]:
    """Return two tensors of 8 bytes, with any start of the second."""
    return {"a": entry([2], 0, 8), "b": entry([2], second, second + 8)}


def write(path: Path, header: bytes | dict[str, Any], data: int) -> Path:
    """Write a file with any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


def tensors(path: Path, *names: str) -> Path:
    """Write a sound file of 4-byte tensors."""
    header = {name: entry([1], 4 * i, 4 * i + 4) for i, name in enumerate(names)}
    return write(path, header, 4 * len(names))


def index(folder: Path, weight_map: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


refusal = partial(error_of, ModelError, from_safetensors)


def test_a_file_gives_names_shapes_dtypes_and_owners(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "layer.weight": entry([2, 3], 0, 12, "BF16"),
        "layer.steps": entry([], 12, 20, "I64"),
        "scale": entry([], 20, 24),
        "none": entry([0, 4], 24, 24),
    }
    spec = from_safetensors(write(tmp_path / "a.safetensors", header, 24))
    found = {p.name: (p.shape, p.dtype, p.owners, p.trained) for p in spec.parameters}
    assert found == {
        "layer.weight": ((2, 3), DType.BF16, (OwningModule("layer", ""),), True),
        "layer.steps": ((), DType.INT64, (OwningModule("layer", ""),), False),
        "scale": ((), DType.FP32, (OwningModule("", ""),), True),
        "none": ((0, 4), DType.FP32, (OwningModule("", ""),), True),
    }
    assert dict(spec.checkpoint)["layer.steps"] is DType.INT64
    assert spec.source == str(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "ordered",
    [
        ["head", "layers.2.b", "layers.2.experts.9.w", "layers.2.experts.11.w", "layers.2.w", "layers.10.w"],
        ["h2.w", "h10.w"],
        ["²", "³"],
    ],
)
def test_natural_order(ordered: list[str]) -> None:
    assert sorted(reversed(ordered), key=natural) == ordered


# --- one file ------------------------------------------------------------------------------------------

HEADERS: list[tuple[bytes | dict[str, Any], int, str]] = [
    (b"[]", 0, "must be a JSON object; got list"),
    (b'{"\xff": 1}', 0, "must be JSON in UTF-8; got the byte 0xff at 2"),
    (b'{"a": {}, "a": {}}', 0, "must name every key once; got `a` more than once"),
    ({"t": []}, 4, "must have `dtype`, `shape` and `data_offsets`; got []"),
    ({"t": entry([-1], 0, 4)}, 4, "`shape` must be a list of whole numbers, 0 or more; got [-1]"),
    ({"t": entry([1], 4, 0)}, 4, "`data_offsets` must be a begin and an end"),
    ({"t": entry([2], 0, 4)}, 4, "must span 4 bytes for each element of F32 [2]; got 4 bytes, [0, 4]"),
    ({"t": entry([1], 0, 4, "F8_E8M0")}, 4, "must hold dtypes that zerodrift knows; got F8_E8M0 in `t`"),
    (pair(4), 12, "b`: must begin after the bytes of `a`; got an overlap of 4 bytes"),
    (pair(12), 20, "b`: must begin where the bytes of `a` end; got a gap of 4 bytes"),
    (pair(8), 15, "download it again"),
    (pair(8), 17, "must end with its last tensor"),
]


@pytest.mark.parametrize(("header", "size", "said"), HEADERS, ids=[said[:30] for *_, said in HEADERS])
def test_a_header_that_makes_no_sense(
    tmp_path: Path, header: bytes | dict[str, Any], size: int, said: str
) -> None:
    assert said in refusal(write(tmp_path / "a.safetensors", header, size))
    assert from_safetensors(write(tmp_path / "a.safetensors", dict(reversed(pair(8).items())), 16)).numel == 4


def test_a_file_that_is_cut_or_no_safetensors(tmp_path: Path) -> None:
    for data, said in (
        (b"\x10\x00", "must open with a header length of 8 bytes; got 2 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", "a header length of 9,223,372,036,854,775,808"),
        (b"version https://git-lfs.github.com/spec/v1", "got a pointer of Git LFS. Run `git lfs pull`"),
        ((500).to_bytes(8, "little") + b"{}", "must hold its header of 500 bytes; got 10 bytes"),
    ):
        (tmp_path / "a.safetensors").write_bytes(data)
        assert said in refusal(tmp_path / "a.safetensors")


# --- several files -------------------------------------------------------------------------------------


def test_an_index_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    tensors(tmp_path / "one.safetensors", "a", "c")
    tensors(tmp_path / "two.safetensors", "b")
    tensors(tmp_path / "stray.safetensors", "z")
    path = index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"})
    spec = from_safetensors(path)
    assert [parameter.name for parameter in spec.parameters] == ["a", "b", "c"]
    assert from_safetensors(tmp_path).parameters == spec.parameters
    path.unlink()
    assert len(from_safetensors(tmp_path).parameters) == 4, "a folder without an index is all of its files"
    tensors(tmp_path / "two.safetensors", "b", "a")
    assert "two.safetensors`: must not repeat tensors of `one.safetensors`; got `a`" in refusal(tmp_path)


def test_a_missing_shard_and_every_other_problem(tmp_path: Path) -> None:
    tensors(tmp_path / "one.safetensors", "a", "extra")
    (tmp_path / "torn.safetensors").write_bytes(b"")
    weight_map = {"a": "one.safetensors", "lost": "one.safetensors", "b": "gone.safetensors"}
    text = refusal(index(tmp_path, weight_map | {"c": "torn.safetensors"}))
    for said in (
        "4 problems",
        "one.safetensors`: must hold the tensors that `model.safetensors.index.json` lists; got no `lost`",
        "must list every tensor of `one.safetensors`; got no `extra`",
        "gone.safetensors`: must exist",
        "torn.safetensors`: must open with a header length",
    ):
        assert said in text


def test_what_is_not_there_ambiguous_or_not_safetensors(tmp_path: Path) -> None:
    assert "must exist" in refusal(tmp_path / "none")
    assert "a folder without any" in refusal(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"")
    assert "must end in `.safetensors`" in refusal(tmp_path / "a.bin")
    tensors(tmp_path / "one.safetensors", "a")
    for name in ("left", "right"):
        index(tmp_path, {"a": "one.safetensors"}).rename(tmp_path / f"{name}.safetensors.index.json")
    assert "must hold one index" in refusal(tmp_path)
    assert from_safetensors(tmp_path / "left.safetensors.index.json").numel == 1


@pytest.mark.parametrize("weight_map", [[1], {"a": "../one.safetensors"}, {"a": "/a.safetensors"}])
def test_an_index_names_only_files_beside_it(tmp_path: Path, weight_map: Any) -> None:
    said = "must name a `.safetensors` file beside it" if "a" in weight_map else "must have `weight_map`"
    assert said in refusal(index(tmp_path, weight_map))
