"""Effects of `backend: fsdp2` on models, loops and files: values, refusals, collectives, resuming."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from tests.checkpoint_files import misplaced_chunks
from tests.numerics.networks import GPT, WIDTH, batch
from tests.numerics.runs import config, diff, make, masters, train
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift import empty
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.dtypes import DType
from zerodrift.errors import ModelError, RankError, UnsupportedError
from zerodrift.weights.exporter import export
from zerodrift.weights.load import load_weights

fsdp2 = partial(config, backend="fsdp2")
ROUTERS = [{"match": "*.router.*", "pin": "fp32"}]


def step(engine: Any) -> None:
    engine.backward(engine(batch(0, engine.mesh.rank("data"))))
    assert engine.step().updated


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
    assert {str(value.dtype) for value in engine.parameter("norm.weight").state.values()} == {"torch.float32"}
    assert model.embed.weight.grad is None
    engine.destroy()


class Wide(GPT):
    """A model whose root has a tied embedding that stays fp32, and wide layers that do not."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.norm = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).bfloat16()
        return self.head(self.norm(self.layers[0](x)))


def lora() -> GPT:
    model = GPT(layers=2).requires_grad_(False)
    for layer in model.layers:
        layer.attention.out.requires_grad_(True)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]]]] = {
    "a tied weight of its own kind in one group": (Wide, [{"match": "embed.weight", "pin": "fp32"}]),
    "frozen parameters": (lora, []),
    "recomputed blocks": (partial(GPT, layers=1, moe=True, recompute=False), ROUTERS),
    "reentrantly recomputed blocks": (partial(GPT, layers=1, moe=True, recompute=True), ROUTERS),
}


@on_ranks(2)
def test_a_model_has_the_numbers_of_the_native_backend() -> None:
    for name, (make_model, rules) in MODELS.items():
        found = []
        for backend in ("native", "fsdp2"):
            written = config(3, "bf16", 2, backend=backend, precision={"storage": "fp32", "rules": rules})
            engine = make(written, make_model())
            run = train(engine, 2, 2)
            found.append((run.losses, run.masters))
            engine.destroy()
        (losses, native), (others, fsdp2) = found
        assert losses == others and diff(native, fsdp2) == [], name


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
        assert diff(dict(other.named_parameters()), masters(engine)) == []
        step(engine)
        assert not torch.equal(engine.parameter("embed.weight").master, other.embed.weight)
        engine.destroy()


@on_ranks(2)
def test_a_parameter_that_left_its_place_is_named() -> None:
    engine = make(fsdp2(3, "fp32"), GPT(layers=1))
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


def switched_off(backend: str) -> list[list[torch.Tensor]]:
    """Return gradients of two micro-batches, one of which may run with frozen norms until its backward
    begins or ends."""
    found = []
    for off, early in ((None, True), (0, True), (1, True), (1, False)):
        engine = make(config(3, "bf16", 2, backend=backend), GPT(tied=False, layers=1))
        norms = [engine.module.norm, engine.module.layers[0].norm1]
        for micro in range(2):
            for norm in norms:
                norm.requires_grad_(micro != off)
            loss = engine(batch(0, engine.mesh.rank("data"), micro))
            if not early:
                engine.backward(loss)
            for norm in norms:
                norm.requires_grad_(True)
            if early:
                engine.backward(loss)
            if micro == 0:
                engine.step()
        names = ("norm.weight", "layers.0.norm1.weight", "head.weight")
        found.append([engine.parameter(name).gradient.clone() for name in names])
        assert engine.step().updated
        engine.destroy()
    return found


@on_ranks(2)
def test_what_is_frozen_for_a_forward_has_no_gradient_of_it() -> None:
    native, theirs = (switched_off(backend) for backend in ("native", "fsdp2"))
    whole = native[0]
    for ours, other in zip(native, theirs, strict=True):
        torch.testing.assert_close(ours, other)
    for run in native[1:]:
        assert not torch.equal(run[0], whole[0]) and not torch.equal(run[1], whole[1])
    torch.testing.assert_close(native[1][0] + native[2][0], whole[0])
    assert all(torch.equal(run[2], whole[2]) for run in native)


GATHER = ("all_gather", DType.BF16, None, "shard")
WIDE_GATHER = ("all_gather", DType.FP32, None, "shard")
REDUCE = ("reduce_scatter", DType.FP32, DType.FP32, "shard")
NARROW_REDUCE = ("reduce_scatter", DType.BF16, DType.FP32, "shard")
NORM = {"rules": [{"match": "norm.*", "pin": "fp32"}]}
TRAVELS: list[tuple[int, int, dict[str, Any], dict[Any, int]]] = [
    (3, 2, {}, {GATHER: 10, REDUCE: 6}),  # three groups forward, two again backward: the root stays
    (2, 3, {}, {GATHER: 3, REDUCE: 9}),
    (1, 3, {}, {GATHER: 3, REDUCE: 3}),
    (0, 2, {}, {GATHER: 0, ("all_reduce", DType.FP32, DType.FP32, "replicate"): 3}),
    (3, 1, {"reduce": {"wire": "bf16"}}, {NARROW_REDUCE: 3, REDUCE: 0}),
    (3, 1, NORM, {WIDE_GATHER: 1, REDUCE: 4}),
]


@on_ranks(2)
def test_what_travels_is_the_plans() -> None:
    for stage, micro, precision, counts in TRAVELS:
        rest = {"precision": precision} if precision else {}
        engine = make(fsdp2(stage, "bf16", micro, **rest), GPT(layers=2))
        train(engine, 1, micro)
        with engine.comm.record() as log:
            for number in range(micro):
                engine.backward(engine(batch(1, engine.mesh.rank("data"), number)))
                engine.step()
        engine.destroy()
        found = Counter((call.op, call.dtype, call.sum, call.axis) for call in log)
        assert {call: found[call] for call in counts} == counts, (stage, micro, precision)


class Skipping(GPT):
    """A GPT whose two blocks run in different orders on two ranks."""

    def blocks(self) -> Iterable[nn.Module]:
        return self.layers if torch.distributed.get_rank() else reversed(self.layers)


@on_ranks(2)
def test_different_orders_are_an_error_before_any_update() -> None:
    engine = make(fsdp2(3, "fp32"), Skipping())
    engine.backward(engine(batch(0)))
    with pytest.raises(RankError, match="same order"):
        engine.step()


class Twice(nn.Module):
    """A weight in two products, of which the second may be recomputed."""

    def __init__(self, again: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products(x, self.weight, self.weight)

    def products(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(nn.functional.linear(x, first))
        if not self.again:
            return nn.functional.linear(hidden, second).float().square().sum()
        out = checkpoint(nn.functional.linear, hidden, second, use_reentrant=self.again == "reentrant")
        return out.float().square().sum()


@on_ranks(2)
def test_what_several_uses_contribute_is_added_in_the_accumulate_dtype() -> list[str]:
    """The sum of a weight's uses is that in fp32, in any dtype of each."""
    found = []
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    for again, stage in itertools.product(("", "non-reentrant", "reentrant"), (0, 2, 3)):
        torch.manual_seed(0)
        model = nn.Sequential(Twice(again))
        uses = [model[0].weight.detach().bfloat16().requires_grad_() for _ in range(2)]
        model[0].products(x, *uses).backward()
        engine = make(fsdp2(stage, "bf16"), model)
        engine.backward(engine(x))
        wanted = uses[0].grad.float() + uses[1].grad.float()
        if not torch.equal(engine.parameter("0.weight").gradient, wanted):
            found.append(f"stage {stage}, {again or 'no'} recomputation")
        engine.destroy()
    return found


@on_ranks(2)
def test_a_plain_backward_needs_the_loss_scale() -> None:
    engine = make(fsdp2(3, "fp16"), GPT(layers=1))
    with pytest.raises(UnsupportedError, match="must be scaled"):
        engine(batch(0)).backward()
    engine.scale(engine(batch(0, engine.mesh.rank()))).backward()
    engine.step()


SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


def config_of(backend: str, **rest: Any) -> dict[str, Any]:
    precision = {"storage": "fp32", "rules": [{"match": "*.router.*", "pin": "fp32"}]}
    return config(3, "bf16", 2, backend=backend, precision=precision, **rest)


def saved(backend: str, folder: str, rest: dict[str, Any]) -> list[float]:
    engine = make(config_of(backend, **rest), GPT(layers=1, moe=True))
    train(engine, 2, 2)
    Checkpoints(engine, folder).save()
    if engine.mesh.rank() == 0:
        torch.save(masters(engine), f"{folder}.masters")
    else:
        masters(engine)
    return train(engine, 2, 2).losses


def resumed(backend: str, folder: str, rest: dict[str, Any]) -> list[float]:
    engine = make(config_of(backend, **rest), GPT(layers=1, moe=True, seed=5))
    assert Checkpoints(engine, folder).load().step == engine.global_steps == 2
    return train(engine, 2, 2).losses


@pytest.mark.parametrize(
    ("first", "second", "rest"),
    [("native", "fsdp2", {}), ("fsdp2", "native", {"optimizer": SGD}), ("fsdp2", "fsdp2", {})],
)
def test_a_run_goes_on_with_the_other_backend(
    first: str, second: str, rest: dict[str, Any], tmp_path: Path
) -> None:
    straight = run_ranks(saved, 2, first, str(tmp_path), rest)
    assert misplaced_chunks(tmp_path / "step-00000002") == []
    assert run_ranks(resumed, 2, second, str(tmp_path), rest) == straight
    if first == "native":
        run_ranks(spread, 4, str(tmp_path))


def spread(folder: str) -> None:
    """Load on twice as many ranks, as two replicas, and at stage 1."""
    for rest in ({"sharding": {"replicate": 2}}, {"zero_optimization": {"stage": 1}}):
        engine = make({**config_of("fsdp2"), **rest}, GPT(layers=1, moe=True, seed=5))
        Checkpoints(engine, folder).load()
        assert diff(torch.load(f"{folder}.masters"), masters(engine)) == []
        assert engine.parameter("embed.weight").state["exp_avg_sq"].gt(0).any()
        train(engine, 1, 2)
        engine.destroy()


@on_ranks(2)
def test_weights_stream_into_shards(tmp_path: Path) -> None:
    source, file = GPT(layers=1, moe=True, seed=3), tmp_path / "model.safetensors"
    expected = {name: value.detach() for name, value in source.named_parameters()}
    if torch.distributed.get_rank() == 0:
        save_file({**expected, "scale": source.scale}, file)
    torch.distributed.barrier()
    with empty():
        model = GPT(layers=1, moe=True)
    engine = make(config_of("fsdp2"), model, weights=str(file))
    assert diff(expected, masters(engine)) == []
    train(engine, 1, 2)
    load_weights(engine, str(file), quiet=True)
    assert diff(expected, masters(engine)) == []
    assert engine.parameter("embed.weight").state["exp_avg_sq"].gt(0).any()


@on_ranks(2)
def test_an_export_has_the_bytes_of_the_native_backends(tmp_path: Path) -> None:
    for backend in ("native", "fsdp2"):
        engine = make(config_of(backend), GPT(layers=1, moe=True))
        train(engine, 2, 2)
        export(engine, str(tmp_path / backend))
        engine.destroy()
    torch.distributed.barrier()
    first, second = (tmp_path / backend / "model.safetensors" for backend in ("native", "fsdp2"))
    assert first.read_bytes() == second.read_bytes()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x)) * self.w


def listed() -> Block:
    """Make a block with a parameter in a container that is never called."""
    block = Block()
    block.weights = nn.ParameterList([nn.Parameter(torch.ones(8))])
    return block


class Parts(nn.Module):
    """A block that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), nn.Linear(8, 8)
        self.w = nn.Parameter(torch.ones(8))


class Blocks(nn.Module):
    def __init__(self, make_block: Callable[[], nn.Module], call: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make_block() for _ in range(2))
        self.head = nn.Linear(8, 1)
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self._call(block, x)
        return self.head(x).square().mean()


Call = Callable[[Any, torch.Tensor], Any]
FOUND: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "lists": (lambda: nn.ModuleList([Block(), nn.LayerNorm(8)]), lambda b, x: b[1](b[0](x))),
    "dicts": (lambda: nn.ModuleDict({"x": Block()}), lambda b, x: b["x"](x)),
    "no forward": (Parts, lambda b, x: b.other(b.one(x)) * b.w),
    "deep": (lambda: nn.ModuleList([nn.ModuleList([Block()])]), lambda b, x: b[0][0](x)),
}
NAMED: dict[str, tuple[Call, list[str]]] = {
    "its forward": (lambda b, x: b.forward(x), ["blocks.*.*"]),
    "a part of a part": (lambda b, x: b.b[0](b(x)), ["blocks.*.*", "blocks.*.*.*"]),
}


def norm(model: nn.Module, written: dict[str, Any]) -> float | str:
    """Return the norm of a step, or the error of the model."""
    engine = make(written, model)
    try:
        torch.manual_seed(engine.mesh.rank())
        engine.backward(engine(torch.randn(4, 8)))
        return engine.step().grad_norm or 0.0
    except ModelError as error:
        return str(error)
    finally:
        engine.destroy()


def with_other_values(b: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a block with other values, which torch's hooks of `fully_shard` would drop silently."""
    return torch.func.functional_call(b, {name: value * 2 for name, value in b.named_parameters()}, (x,))


@on_ranks(2, timeout=120.0)
def test_fully_shard_has_the_norm_of_stage_0_or_names_what_it_cannot_find() -> list[str]:
    cases: list[tuple[str, Callable[[], nn.Module], Any, list[str], str]] = [
        *((name, block, call, [], "") for name, (block, call) in FOUND.items()),
        *((name, Block, call, [], json.dumps(units)) for name, (call, units) in NAMED.items()),
        *((f"{name}, named", Block, call, units, "") for name, (call, units) in NAMED.items()),
        ("outside", Block, lambda b, x: linear(b(x), b.a.weight), [], "linear(b(x), b.a.weight)"),
        ("other values", Block, with_other_values, [], "`blocks.0."),
    ]
    pins = {"rules": [{"match": "blocks.*.weights.*", "pin": "fp32"}]}
    with pytest.raises(ModelError, match=r"`blocks\.0\.weights`.*which is not called"):
        make(fsdp2(3, "bf16", precision=pins), Blocks(listed, lambda b, x: b(x) * b.weights[0]))
    problems = []
    for name, block, call, units, word in cases:
        sharding = {"units": units} if units else {}
        found = norm(Blocks(block, call), config(3, "fp32", sharding=sharding, backend="fsdp2"))
        if word:
            good = isinstance(found, str) and word in found
        else:
            good = found == pytest.approx(norm(Blocks(block, call), config(0, "fp32")), rel=1e-12)
        problems += [] if good else [f"{name}: {found}"]
    return problems
