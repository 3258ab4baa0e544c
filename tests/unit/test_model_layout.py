"""The bench's sparse checkpoint is one that any reader of safetensors accepts."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from zerodrift.dtypes import DType
from zerodrift.errors import UnsupportedError
from zerodrift.model.safetensors import from_safetensors

SCRIPT = Path(__file__).parents[2] / "bench" / "deepseek_v3_layout.py"


@pytest.fixture(scope="module")
def layout() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deepseek_v3_layout", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_small_layout_is_read_by_the_reference_reader(layout: ModuleType, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    layout.write(tmp_path, layers=4, experts=2, shards=3)
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="numpy") as reader:
            found |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    expected = {name: shape for name, shape, _ in layout.parameters(layers=4, experts=2)}
    assert found == expected
    spec = from_safetensors(tmp_path)
    assert {parameter.name: parameter.shape for parameter in spec.parameters} == expected


@pytest.mark.long
def test_the_whole_layout_is_sparse_and_read_quickly(layout: ModuleType, tmp_path: Path) -> None:
    try:
        index = layout.write(tmp_path)
    except UnsupportedError as error:
        pytest.skip(str(error))
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 163 and sum(file.stat().st_blocks for file in files) * 512 < 64 * 2**20
    began = time.process_time()
    spec = from_safetensors(index)
    assert time.process_time() - began < 10
    assert (len(spec.parameters), spec.numel) == (45_395, 671_026_419_200)
    assert sum(parameter.dtype is DType.FP32 for parameter in spec.parameters) == 58, "biases"


def test_a_file_system_without_holes_is_refused(
    layout: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        st_blocks = 1 << 30

    monkeypatch.setattr(Path, "stat", lambda self, **_: Full())
    with pytest.raises(UnsupportedError, match="must be on a file system with sparse files"):
        layout._check_sparse(tmp_path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    layout._check_sparse(tmp_path)
    assert sys.modules.get("deepseek_v3_layout") is None
