"""`describe` takes every accepted form; factories are called with care; a module is read with its ties."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.unit.refusals import error_of
from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.model.module import from_module
from zerodrift.model.sources import ACCEPTED, describe, make
from zerodrift.model.spec import OwningModule

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

def nothing():
    return {{"model": 1}}

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


refusal = partial(error_of, ModelError, describe)


def test_a_module_is_read_and_a_factory_is_called_on_the_meta_device(factory: str) -> None:
    spec = describe(torch.nn.Linear(2, 3))
    assert spec.numel == 9 and describe(spec) is spec
    path = list(sys.path)
    spec = describe(f"{factory}:build")
    assert (spec.source, spec.numel) == (f"{factory}:build", 7 * 2**40)
    assert sys.path == path
    assert describe(f"{factory}:real").numel == 16


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("broken", "when it is called without arguments; got RuntimeError: no such size."),
        ("leaves", "got SystemExit: usage: ..."),
        ("nothing", "must return a torch.nn.Module; got dict."),
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
    Path("factory_with_a_slip.py").write_text("def f(:\n")
    assert "SyntaxError" in refusal("factory_with_a_slip:f")
    assert "must be importable; got ModuleNotFoundError" in refusal("no_such_room.at_all:build")


def test_what_fits_no_form_lists_the_forms(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    for model, got in (
        (Path("nowhere.safetensors"), "got no such file or folder"),
        (str(tmp_path), "got a folder with neither a config nor safetensors files"),
        (tmp_path / "weights.bin", "got a file that ends in '.bin'"),
        (3, "got int"),
        (torch.nn.Linear, "got the class Linear. Give an instance of it."),
    ):
        text = refusal(model)
        assert got in text and all(form in text for form in ACCEPTED), text
    for text in ("build", "a:b:c", ":c"):
        with pytest.raises(ModelError, match=r"must be written `package.module:callable`"):
            make(text)


# --- modules ----------------------------------------------------------------------------------------------


nn = torch.nn

LINEAR = "torch.nn.modules.linear.Linear"
EMBEDDING = "torch.nn.modules.sparse.Embedding"


class Tied(nn.Module):
    """A model with an embedding and a head of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class DeclaredTie(nn.Module):
    """A model with a tie that is declared, as in `transformers`, and not made."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        self.body = nn.Linear(4, 4)
        self.embed = nn.Embedding(6, width)
        self.all_tied_weights_keys = {"head.weight": "embed.weight", "gone.weight": "embed.weight"}


def names(model: nn.Module) -> list[tuple[str, ...]]:
    return [parameter.names for parameter in from_module(model).parameters]


def test_names_shapes_owners_and_order_are_the_modules_own() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5))
    spec = from_module(model)
    assert [parameter.name for parameter in spec.parameters] == [name for name, _ in model.named_parameters()]
    assert [parameter.shape for parameter in spec.parameters] == [(5, 3), (5,), (5,), (5,)]
    assert spec.parameters[0].owners == (OwningModule("0", LINEAR),)
    assert spec.parameters[2].owners == (OwningModule("2", "torch.nn.modules.normalization.LayerNorm"),)
    assert all(parameter.dtype is DType.FP32 and parameter.trained for parameter in spec.parameters)
    assert not any(parameter.trained for parameter in from_module(model.requires_grad_(False)).parameters)
    assert (spec.source, spec.checkpoint, spec.numel) == ("Sequential", (), 30)
    assert from_module(model, "mine").source == "mine"
    with torch.device("meta"):
        meta = Tied()
    assert from_module(meta) == from_module(Tied())


def test_a_tied_parameter_is_one_with_all_its_names() -> None:
    shared, *_ = from_module(Tied()).parameters
    assert names(Tied()) == [("embed.weight", "head.weight"), ("body.weight",), ("body.bias",)]
    assert shared.owners == (OwningModule("embed", EMBEDDING), OwningModule("head", LINEAR))
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    assert names(nn.ModuleList([block, nn.Linear(2, 2, bias=False), block])) == [
        *(("0.0.weight", "2.0.weight"), ("0.0.bias", "2.0.bias"), ("0.1.weight", "2.1.weight"), ("1.weight",))
    ]


def test_a_declared_tie_counts_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"language": DeclaredTie()})
    assert names(model)[0] == ("language.head.weight", "language.embed.weight") and len(names(model)) == 3
    assert len(names(DeclaredTie())) == 4, "with weights the objects are the truth"


def unknown() -> nn.Module:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False, dtype=torch.bfloat16) for _ in range(3)])
    for index, dtype in ((0, torch.uint16), (1, torch.uint16), (2, torch.complex128)):
        model[index].weight = nn.Parameter(torch.zeros(2, 2, dtype=dtype), requires_grad=False)
    return model


def quantised() -> nn.Module:
    model, codes = nn.Linear(4, 4), torch.zeros(8, 1, dtype=torch.uint8)
    model.weight = type("Params4bit", (nn.Parameter,), {})(codes, requires_grad=False)
    return model


def wide() -> nn.Module:
    with torch.device("meta"):
        return DeclaredTie(width=5)


def split() -> nn.Module:
    model = Tied()
    model.load_state_dict(model.state_dict(), assign=True)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dtypes": (unknown, "2 problems.*torch.uint16 in `0.weight`, `1.weight`.*torch.complex128 in `2.weight`"),
    "nf4": (quantised, "`weight`: must be a plain tensor.*`precision.frozen: nf4`"),
    "lazy": (lambda: nn.LazyLinear(3), "`weight`"),
    "of inference": (torch.inference_mode()(lambda: nn.Linear(3, 3)), "`weight`.*inference_mode"),
    "sparse": (lambda: nn.ParameterList([torch.eye(3).to_sparse()]), "`0`: must be a dense.*sparse_coo"),
    "one memory": (split, "`head.weight`: must be the same Parameter as `embed.weight`"),
    "a tie": (wide, r"`head.weight`: must be like `embed.weight`.*\(6, 4\).*\(6, 5\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_described_is_refused_by_name(case: str) -> None:
    model, said = REFUSED[case]
    with pytest.raises(ModelError, match=re.compile(said, re.DOTALL)):
        from_module(model())
