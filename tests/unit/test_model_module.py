"""A ModelSpec of a module: ties, buffers, classes, and refusals."""

from __future__ import annotations

import pytest

from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.model.module import _ExpertCounts, from_module
from zerodrift.model.spec import BufferSpec, OwningModule

torch = pytest.importorskip("torch")
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


def test_names_shapes_owners_and_order_are_the_modules_own() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5))
    spec = from_module(model)
    assert [parameter.name for parameter in spec.parameters] == [name for name, _ in model.named_parameters()]
    assert [parameter.shape for parameter in spec.parameters] == [(5, 3), (5,), (5,), (5,)]
    assert spec.parameters[0].owners == (OwningModule("0", LINEAR),)
    assert spec.parameters[2].owners == (OwningModule("2", "torch.nn.modules.normalization.LayerNorm"),)
    assert all(parameter.dtype is DType.FP32 and parameter.trained for parameter in spec.parameters)
    assert (spec.source, spec.checkpoint, spec.numel) == ("Sequential", (), 30)
    assert from_module(model, "mine").source == "mine"


def test_a_parameter_may_be_the_roots_empty_or_not_trained() -> None:
    model = Tied()
    model.register_parameter("scale", nn.Parameter(torch.zeros(())))
    model.body.bias.requires_grad_(False)
    scale, *others = from_module(model).parameters
    assert (scale.name, scale.shape, scale.numel) == ("scale", (), 1)
    assert scale.owners == (OwningModule("", f"{__name__}.Tied"),)
    assert [(each.name, each.trained) for each in (scale, *others)] == [
        *(("scale", True), ("embed.weight", True), ("body.weight", True), ("body.bias", False))
    ]
    empty = nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))])
    assert [each.shape for each in from_module(empty).parameters] == [(0,), (0,)], "no memory is shared"


def test_the_meta_device_gives_the_same_spec() -> None:
    with torch.device("meta"):
        meta = Tied()
    assert from_module(meta) == from_module(Tied())


def test_a_tied_parameter_is_one_with_all_its_names() -> None:
    shared, *others = from_module(Tied()).parameters
    assert [each.names for each in others] == [("body.weight",), ("body.bias",)]
    assert shared.names == ("embed.weight", "head.weight")
    assert shared.owners == (OwningModule("embed", EMBEDDING), OwningModule("head", LINEAR))
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    spec = from_module(nn.ModuleList([block, nn.Linear(2, 2, bias=False), block]))
    assert [parameter.names for parameter in spec.parameters] == [
        *(("0.0.weight", "2.0.weight"), ("0.0.bias", "2.0.bias"), ("0.1.weight", "2.1.weight"), ("1.weight",))
    ]
    inner = Tied()
    nested = nn.ModuleDict({"first": inner, "deep": nn.ModuleDict({"again": inner.head})})
    shared = from_module(nested).parameters[0]
    assert shared.names == ("first.embed.weight", "first.head.weight", "deep.again.weight")
    assert [owner.path for owner in shared.owners] == ["first.embed", "first.head", "deep.again"]


def test_a_declared_tie_counts_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, wide = nn.ModuleDict({"language": DeclaredTie()}), DeclaredTie(width=5)
    assert [parameter.names for parameter in from_module(model).parameters] == [
        *(("language.head.weight", "language.embed.weight"), ("language.body.weight",)),
        ("language.body.bias",),
    ]
    assert len(from_module(DeclaredTie()).parameters) == 4, "with weights the objects are the truth"
    with pytest.raises(ModelError, match=r"`head.weight`: must be like `embed.weight`.*\(6, 4\).*\(6, 5\)"):
        from_module(wide)


def test_buffers_with_dtype_and_persistence() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model[0].register_buffer("table", torch.zeros(2, 2, dtype=torch.bfloat16), persistent=False)
    model.register_buffer("nothing", None)
    model.register_buffer("mask", torch.zeros(4, dtype=torch.bool), persistent=False)
    assert from_module(model).buffers == (
        BufferSpec("mask", (4,), DType.BOOL, persistent=False),
        BufferSpec("0.running_mean", (3,), DType.FP32),
        BufferSpec("0.running_var", (3,), DType.FP32),
        BufferSpec("0.num_batches_tracked", (), DType.INT64),
        BufferSpec("0.table", (2, 2), DType.BF16, persistent=False),
    )


def test_every_unknown_dtype_is_named_at_once() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False, dtype=torch.bfloat16) for _ in range(3)])
    from_module(model)
    for index, dtype in ((0, torch.uint16), (1, torch.uint16), (2, torch.complex128)):
        model[index].weight = nn.Parameter(torch.zeros(2, 2, dtype=dtype), requires_grad=False)
    said = r"(?s)2 problems.*torch.uint16 in `0.weight`, `1.weight`.*torch.complex128 in `2.weight`"
    with pytest.raises(ModelError, match=said):
        from_module(model)


@pytest.mark.parametrize(("kind", "word"), [("Params4bit", "nf4"), ("Int8Params", "int8")])
def test_a_parameter_of_bitsandbytes_names_the_key_to_use_instead(kind: str, word: str) -> None:
    model = nn.Linear(4, 4)
    model.weight = type(kind, (nn.Parameter,), {})(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    words = f"(?s)`weight`: must be a plain tensor.*{kind} of bitsandbytes.*`precision.frozen: {word}`"
    with pytest.raises(ModelError, match=words):
        from_module(model)


def test_a_lazy_module_is_refused_until_it_has_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(ModelError) as caught:
        from_module(model)
    assert all(f"`{name}`" in str(caught.value) for name in ("0.weight", "0.bias", "1.running_mean"))
    model(torch.zeros(2, 5))
    assert from_module(model).parameters[0].shape == (3, 5)


def test_two_parameters_over_one_memory_are_refused() -> None:
    model = Tied()
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(ModelError, match=r"`head.weight`: must be the same Parameter as `embed.weight`"):
        from_module(model)
    model.head.weight = model.embed.weight
    assert from_module(model).parameters[0].names == ("embed.weight", "head.weight")


def test_experts_are_looked_at_once_and_not_once_per_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking from each of 14,848 experts at all its neighbours took minutes."""
    asked: list[str] = []
    chosen = _ExpertCounts._chosen

    def counted(self: _ExpertCounts, path: str) -> int:
        asked.append(path)
        return chosen(self, path)

    monkeypatch.setattr(_ExpertCounts, "_chosen", counted)
    layers = [nn.Module(), nn.Module()]
    for layer in layers:
        layer.top_k = 2
        layer.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))
    spec = from_module(nn.Sequential(*layers))
    assert {parameter.used for parameter in spec.parameters} == {(2, 8)}
    assert asked == ["0.experts", "1.experts"]
