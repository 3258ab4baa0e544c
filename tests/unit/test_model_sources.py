"""`describe` takes every accepted form, and factories are imported and called with care."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerodrift.errors import ModelError
from zerodrift.model.sources import ACCEPTED, describe, from_factory, from_safetensors

torch = pytest.importorskip("torch")

FACTORIES = """
import sys
from torch import nn
from {name}_part import WIDTH

def build():
    return nn.Linear(WIDTH, 2 ** 40, bias=False)

def real():
    import torch
    return nn.Linear(WIDTH, 2, device="cpu")

def broken():
    raise RuntimeError("no such\\n  size")

def leaves():
    sys.exit("usage: ...")

def needs(size):
    return nn.Linear(size, size)

def nothing():
    return {{"model": 1}}

class Builders:
    @staticmethod
    def small():
        return nn.Linear(1, 1)

NUMBER = 3
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Write a module that builds models into the working folder, and return its name."""
    name = "factory_of_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    (tmp_path / f"{name}.py").write_text(FACTORIES.format(name=name))
    (tmp_path / f"{name}_part.py").write_text("WIDTH = 7\n")
    monkeypatch.chdir(tmp_path)
    yield name
    for module in (name, f"{name}_part"):
        sys.modules.pop(module, None)


def refusal(model: object) -> str:
    with pytest.raises(ModelError) as caught:
        describe(model)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_module_is_read_and_a_factory_is_called_on_the_meta_device(factory: str) -> None:
    spec = describe(torch.nn.Linear(2, 3))
    assert spec.numel == 9 and describe(spec) is spec
    path = list(sys.path)
    spec = describe(f"{factory}:build")
    assert (spec.source, spec.numel) == (f"{factory}:build", 7 * 2**40)
    assert sys.path == path
    assert from_factory(f"{factory}:real").numel == 16
    assert from_factory(f"{factory}:Builders.small").numel == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("broken", "when it is called without arguments; got RuntimeError: no such size."),
        ("leaves", "got SystemExit: usage: ..."),
        ("needs", "got TypeError: needs() missing 1 required positional argument"),
        ("nothing", "must return a torch.nn.Module; got dict."),
        ("NUMBER", "`NUMBER` must be callable; got int."),
        ("bulid", "must have `bulid`; got none. Did you mean `build`?"),
    ],
)
def test_a_factory_that_fails_says_why_in_a_line(factory: str, call: str, said: str) -> None:
    text = refusal(f"{factory}:{call}")
    assert said in text and "\n" not in text and text.startswith(f"`{factory}:{call}`: ")


def test_a_file_that_trains_when_it_is_imported_is_told_what_to_do(factory: str, tmp_path: Path) -> None:
    assert describe(f"{factory}.py:build").numel == 7 * 2**40
    made = "import torch\nmodel = torch.nn.Linear(1, 1)"
    for number, (text, said) in enumerate((("1 / 0", "got ZeroDivisionError"), (made, "got Linear"))):
        (tmp_path / f"{factory}_{number}.py").write_text(text)
        told = refusal(f"{factory}_{number}.py:model")
        assert said in told and "put the model into a function, as in `train.py:make_model`" in told
    Path("factory_with_a_hole.py").write_text("import no_such_room\n")
    assert "No module named 'no_such_room'" in refusal("factory_with_a_hole:build")
    Path("factory_with_a_slip.py").write_text("def f(:\n")
    assert "SyntaxError" in refusal("factory_with_a_slip:f")
    Path(f"{factory}_long.py").write_text("def f():\n    raise ValueError('x' * 10_000)\n")
    assert len(refusal(f"{factory}_long:f")) < 1000, "a long cause is cut"
    assert "must be importable; got ModuleNotFoundError" in refusal("no_such_room.at_all:build")


@pytest.mark.parametrize("text", ["build", "a:b:c", "a b:c", ":c", "a:", "a.:c"])
def test_a_factory_has_one_form(text: str) -> None:
    with pytest.raises(ModelError, match=r"must be written `package.module:callable`"):
        from_factory(text)


def test_what_fits_no_form_lists_the_forms(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    for model, got in (
        ("nowhere", "got no such file or folder"),
        (Path("nowhere.safetensors"), "got no such file or folder"),
        (str(tmp_path), "got a folder with neither a config nor safetensors files"),
        (tmp_path / "weights.bin", "got a file that ends in '.bin'"),
        (3, "got int"),
        (torch.nn.Linear, "got the class Linear. Give an instance of it."),
    ):
        text = refusal(model)
        assert got in text and all(form in text for form in ACCEPTED), text


def test_a_hub_name_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hub = "`hf download some-org/Some-Model-7B --local-dir Some-Model-7B`"
    assert hub in refusal("some-org/Some-Model-7B")
    Path("runs").mkdir()
    assert "hf download" not in refusal("runs/one")


def weights(folder: Path) -> Path:
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    return path


def test_safetensors_are_read_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = weights(tmp_path)
    assert describe(path).source == str(path)
    assert describe(tmp_path).parameters == describe(str(path)).parameters
    monkeypatch.setenv("HOME", str(tmp_path))
    assert describe("~/model.safetensors").numel == 1


def test_without_transformers_a_folder_falls_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'zerodrift[hf]'" in refusal(tmp_path)
    path = weights(tmp_path)
    spec = describe(tmp_path)
    assert spec.source == f"{tmp_path} (tensor headers only: transformers is not installed)"
    assert spec.parameters == from_safetensors(path).parameters
