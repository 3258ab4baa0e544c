"""Effects of `backend: fsdp2` on models and loops: values in and out, groups, refusals, collectives."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT, WIDTH, batch
from tests.numerics.runs import config, diff, make, train
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.dtypes import DType
from zerodrift.engine.shards import Shards
from zerodrift.errors import ModelError, RankError, UnsupportedError


def fsdp2(stage: int = 3, mode: str = "fp32", micro: int = 1, **rest: Any) -> dict[str, Any]:
    return config(stage, mode, micro, backend="fsdp2", **rest)


ROUTERS = [{"match": "*.router.*", "pin": "fp32"}]


def step(engine: Any, number: int = 0) -> float:
    loss = engine(batch(number, engine.mesh.rank("data")))
    engine.backward(loss)
    assert engine.step().updated
    return float(loss.detach())


# --- what a model becomes -----------------------------------------------------------------------------


@on_ranks(2)
def test_parameters_are_dtensors_with_the_given_bits() -> None:
    model = GPT()
    given = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = make(fsdp2(3, "bf16"), model)
    assert isinstance(model, FSDPModule) and isinstance(model.layers[0], FSDPModule)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.dtype is torch.float32
        assert torch.equal(parameter.full_tensor(), given[name]), name
    assert model.head.weight is model.embed.weight
    step(engine)
    for group in engine.optimizer.param_groups:
        assert all(isinstance(parameter, DTensor) for parameter in group["params"])
    assert {str(value.dtype) for value in engine.parameter("norm.weight").state.values()} == {"torch.float32"}
    assert model.embed.weight.grad is None
    engine.destroy()


class Listed(nn.Module):
    """A model with parameters in a container that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(WIDTH))])
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x @ self.weights[0])


@on_ranks(2)
def test_pinned_parameters_of_a_module_that_is_not_called_are_refused() -> None:
    for pinned in ("*.norm*.*", "*.mlp.weights.*"):
        model = GPT(layers=1)
        model.layers[0].mlp = Listed()
        written = fsdp2(3, "bf16", precision={"rules": [{"match": pinned, "pin": "fp32"}]})
        if "mlp" not in pinned:
            step(make(written, model))
            continue
        with pytest.raises(ModelError, match=r"`layers.0.mlp.weights`"):
            step(make(written, model))


class Wide(GPT):
    """A model whose root has a tied embedding that stays fp32, and wide layers that do not."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.norm = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).bfloat16()
        return self.head(self.norm(self.layers[0](x)))


class Recomputed(GPT):
    """A GPT with activation checkpointing of its blocks."""

    def __init__(self, reentrant: bool, **rest: Any) -> None:
        super().__init__(**rest)
        self.reentrant = reentrant

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def lora() -> GPT:
    model = GPT(layers=2).requires_grad_(False)
    for layer in model.layers:
        layer.attention.out.requires_grad_(True)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]]]] = {
    "a tied weight of its own kind, whose two modules are one group": (
        Wide,
        [{"match": "embed.weight", "pin": "fp32"}],
    ),
    "frozen parameters": (lora, []),
    "recomputed blocks": (partial(Recomputed, False, layers=1, moe=True), ROUTERS),
    "reentrantly recomputed blocks": (partial(Recomputed, True, layers=1, moe=True), ROUTERS),
}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_a_model_has_the_numbers_of_the_native_backend(name: str) -> None:
    make_model, rules = MODELS[name]
    found = []
    for backend in ("native", "fsdp2"):
        written = config(3, "bf16", 2, backend=backend, precision={"storage": "fp32", "rules": rules})
        engine = make(written, make_model())
        run = train(engine, 2, 2)
        found.append((run.losses, run.masters))
        engine.destroy()
    (losses, native), (others, fsdp2) = found
    assert losses == others and diff(native, fsdp2) == []


# --- values in and out --------------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_dict_is_loaded_inside_a_context() -> None:
    for assign in (False, True):
        engine = make(fsdp2(3, "fp32"), GPT(layers=1))
        other = GPT(layers=1, seed=9)
        step(engine)
        with pytest.raises(ModelError, match="gathered"):
            engine.module.load_state_dict(other.state_dict())
        with engine.gathered(write=True):
            engine.module.load_state_dict(other.state_dict(), assign=assign)
            shown = dict(engine.module.named_parameters())
            assert torch.equal(shown["norm.weight"], other.norm.weight)
        for name, value in other.named_parameters():
            assert torch.equal(engine.parameter(name).master, value), name
        step(engine)
        assert not torch.equal(engine.parameter("embed.weight").master, other.embed.weight)
        engine.destroy()


@on_ranks(2)
def test_a_parameter_that_left_its_place_is_named() -> None:
    engine = make(fsdp2(), GPT(layers=1))
    step(engine)
    kept = engine.module.norm.weight
    engine.module.norm.weight = nn.Parameter(kept.detach().clone())
    with pytest.raises(ModelError, match=r"norm\.weight.*another one"):
        engine(batch(0))
    engine.module.norm.weight = kept
    kept.requires_grad_(False)
    with torch.no_grad():
        engine(batch(0))  # a reference policy: what is trained is switched off for a forward
    with pytest.raises(ModelError, match=r"norm\.weight.*must stay trained"):
        engine.step()
    engine.module.norm.weight.requires_grad_(True)
    step(engine, 1)
    engine.destroy()
    with pytest.raises(UnsupportedError, match="destroy"):
        engine(batch(0))


def switched_off(backend: str, stage: int) -> list[list[torch.Tensor]]:
    """Return gradients of two micro-batches, one of which may run with frozen norms until its backward
    begins or ends."""
    found = []
    for off, early in ((None, True), (0, True), (1, True), (0, False), (1, False)):
        engine = make(config(stage, "bf16", 2, backend=backend), GPT(tied=False, layers=1))
        norms = ("norm", "layers.0.norm1")
        for micro in range(2):
            for name in norms:
                engine.module.get_submodule(name).requires_grad_(micro != off)
            loss = engine(batch(0, engine.mesh.rank("data"), micro))
            if not early:
                engine.backward(loss)
            for name in norms:
                engine.module.get_submodule(name).requires_grad_(True)
            if early:
                engine.backward(loss)
            if micro == 0:
                engine.step()
        names = ("norm.weight", "layers.0.norm1.weight", "head.weight")
        found.append([engine.parameter(name).gradient.clone() for name in names])
        assert engine.step().updated
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
@on_ranks(2, timeout=120)
def test_what_is_frozen_for_a_forward_has_no_gradient_of_it(stage: int) -> None:
    native, theirs = (switched_off(backend, stage) for backend in ("native", "fsdp2"))
    whole = native[0]
    for ours, other in zip(native, theirs, strict=True):
        torch.testing.assert_close(ours, other)
    for run in native[1:]:
        assert not torch.equal(run[0], whole[0]) and not torch.equal(run[1], whole[1])
    torch.testing.assert_close(native[1][0] + native[2][0], whole[0])
    assert all(torch.equal(run[2], whole[2]) for run in native)


def pieces() -> list[tuple[str, int, int]]:
    """Return (name, start, elements) of everything that this rank reads."""
    engine = make(fsdp2(sharding={"replicate": 2}, zero_optimization={"stage": 3}), _Uneven())
    shards = Shards(engine)
    masters = {row.name: engine.parameter(row.name).master for row in engine.plan.rows}
    found = []
    for part in shards.weights():
        whole = masters[part.name]
        assert torch.equal(whole.flatten()[part.start : part.start + part.values.numel()], part.values)
        found.append((part.name, part.start, part.values.numel()))
    for piece in shards.pieces():
        values = piece.zeros()
        for span in piece.held:
            values[span.place] = torch.arange(span.start, span.start + span.numel)
        piece.set_weights(values)
    shards.sync_storage()
    for row in engine.plan.rows:
        wanted = torch.arange(row.numel).view(row.shape).float()
        assert torch.equal(engine.parameter(row.name).master, wanted), row.name
    return found


class _Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).mean()


def test_shares_are_every_element_once() -> None:
    model, seen = _Uneven(), Counter()
    for parts in run_ranks(pieces, 4):
        for name, start, numel in parts:
            seen.update((name, element) for element in range(start, start + numel))
    wanted = Counter((name, n) for name, p in model.named_parameters() for n in range(p.numel()))
    assert seen == wanted


# --- what travels -------------------------------------------------------------------------------------


def recorded(stage: int, micro: int, rest: dict[str, Any]) -> list[Any]:
    engine = make(fsdp2(stage, "bf16", micro, **rest), GPT(layers=2))
    train(engine, 1, micro)
    with engine.comm.record() as log:
        for number in range(micro):
            engine.backward(engine(batch(1, engine.mesh.rank("data"), number)))
            engine.step()
    engine.destroy()
    return [(call.op, call.dtype, call.sum, call.axis) for call in log]


def gathers(dtype: DType = DType.BF16) -> Any:
    return "all_gather", dtype, None, "shard"


def reduces(wire: DType = DType.FP32) -> Any:
    return "reduce_scatter", wire, DType.FP32, "shard"


REPLICAS = ("all_reduce", DType.FP32, DType.FP32, "replicate")
NORM = {"rules": [{"match": "norm.*", "pin": "fp32"}]}


TRAVELS: list[tuple[int, int, dict[str, Any], dict[Any, int]]] = [
    (3, 1, {}, {gathers(): 5, reduces(): 3}),  # three groups forward, two again backward: the root stays
    (3, 2, {}, {gathers(): 10, reduces(): 6}),
    (2, 3, {}, {gathers(): 3, reduces(): 9}),
    (1, 3, {}, {gathers(): 3, reduces(): 3}),
    (0, 2, {}, {gathers(): 0, REPLICAS: 3}),
    (3, 1, {"reduce": {"wire": "bf16"}}, {reduces(DType.BF16): 3, reduces(): 0}),
    (3, 1, NORM, {gathers(DType.FP32): 1, reduces(): 4}),
]


@on_ranks(2)
def test_what_travels_is_the_plans() -> None:
    for stage, micro, precision, counts in TRAVELS:
        found = Counter(recorded(stage, micro, {"precision": precision} if precision else {}))
        assert {call: found[call] for call in counts} == counts, (stage, micro, precision)


@on_ranks(2)
def test_nothing_stays_gathered_between_steps() -> None:
    for stage in (1, 3):
        engine = make(fsdp2(stage, "bf16"), GPT(layers=2))
        step(engine)
        with torch.no_grad():
            engine(batch(0))
        step(engine, 1)
        full = [m.full for unit in engine.executor.units for m in unit.members]
        assert {parameter.untyped_storage().nbytes() for parameter in full} == {0}
        assert all(m.sharded.grad is None and m.full.grad is None for m in engine.executor.members.values())
        engine.destroy()


# --- traps --------------------------------------------------------------------------------------------


class Skipping(GPT):
    """A GPT whose two blocks run in different orders on two ranks."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in list(self.layers)[:: -1 if torch.distributed.get_rank() else 1]:
            x = layer(x)
        return self.head(self.norm(x))


@on_ranks(2)
def test_different_orders_are_an_error_before_any_update() -> None:
    engine = make(fsdp2(3), Skipping())
    engine.backward(engine(batch(0)))
    with pytest.raises(RankError, match="same order"):
        engine.step()


class Twice(nn.Module):
    """A weight in two products, of which the second may be in a recomputed piece."""

    def __init__(self, again: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products(x, self.weight, self.weight)

    def products(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(nn.functional.linear(x, first))
        if not self.again:
            return nn.functional.linear(hidden, second)
        return checkpoint(nn.functional.linear, hidden, second, use_reentrant=self.again == "reentrant")


@on_ranks(2)
def test_what_several_uses_contribute_is_added_in_the_accumulate_dtype() -> list[str]:
    """The sum of a weight's uses is that in fp32, in any dtype of each."""
    found = []
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    for again, stage in itertools.product(("", "non-reentrant", "reentrant"), range(4)):
        torch.manual_seed(0)
        block = Twice(again)
        uses = [block.weight.detach().bfloat16().requires_grad_() for _ in range(2)]
        block.products(x, *uses).float().square().sum().backward()
        engine = make(fsdp2(stage, "bf16"), Alone(block))
        engine.backward(engine(x))
        wanted = uses[0].grad.float() + uses[1].grad.float()
        if not torch.equal(engine.parameter("block.weight").gradient, wanted):
            found.append(f"stage {stage}, {again or 'no'} recomputation")
        engine.destroy()
    return found


class Alone(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).float().square().sum()


@on_ranks(2)
def test_a_plain_backward_needs_the_loss_scale() -> None:
    engine = make(fsdp2(3, "fp16"), GPT(layers=1))
    with pytest.raises(UnsupportedError, match="must be scaled"):
        engine(batch(0)).backward()
    engine.scale(engine(batch(0, engine.mesh.rank()))).backward()
    engine.step()
    engine.destroy()
