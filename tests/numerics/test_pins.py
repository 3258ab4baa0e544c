"""Pinned modules are fp32 in every column, in any mode, at any stage, and under any flags for the rest.

The rest of the model is set as low as the config allows: accumulator, wire, master and moments in 16 bits.
The output of a pinned module is compared with the same formula on its fp32 master and its input, bit for
bit, and a router that is not pinned shows that the comparison can tell the two apart.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, make, whole_values
from tests.ranks.harness import on_ranks
from zerodrift.engine.engine import Engine
from zerodrift.errors import ConfigError
from zerodrift.plan.schedule import collectives

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast-bf16": torch.bfloat16}
MODES = tuple(LOW)
FEW_MODES = [pytest.param(mode, marks=[pytest.mark.slow] * (mode == "fp16")) for mode in MODES]
"""Modes of longer tests; fp16 is slow because other tests check a router's columns in it."""
STEPS = 3
ROUTERS = ("layers.0.mlp.router.weight", "layers.1.mlp.router.weight")

Rules = list[dict[str, Any]]
PIN_ROUTERS: Rules = [{"match": "*.router.*", "pin": "fp32"}]


def config_of(stage: int, mode: str, rules: Rules) -> dict[str, Any]:
    """Return a config with the lowest precision everywhere except for the rules' pins."""
    enabled = {"enabled": True}
    flags: dict[str, Any] = {
        "bf16": {"bf16": {**enabled, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        "fp16": {"fp16": {**enabled, "fp16_master_weights_and_grads": True, "loss_scale": 256}},
        "autocast-bf16": {"gradient_accumulation_dtype": "bf16"},
    }[mode]
    wire = {"communication_data_type": str(LOW[mode]).removeprefix("torch.")}
    return config(stage, mode, precision={"rules": rules, "allow_narrow": True}, **wire, **flags)


Calls = dict[str, list[tuple[Tensor, Tensor]]]
"""Path of a module -> input and output of each forward, as its caller sees them."""


def watched(stage: int, mode: str, rules: Rules, model: nn.Module, paths: list[str]) -> tuple[Engine, Calls]:
    """Record inputs before the engine's hooks, and outputs after them."""
    inputs: dict[str, list[Tensor]] = {path: [] for path in paths}
    calls: Calls = {path: [] for path in paths}

    def before(path: str, given: Any) -> None:
        inputs[path].append(given[0].detach().clone())

    def after(path: str, output: Tensor) -> None:
        calls[path].append((inputs[path].pop(), output.detach().clone()))

    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(lambda _, given, path=path: before(path, given))
    engine = make(config_of(stage, mode, rules), model)
    for path in paths:
        model.get_submodule(path).register_forward_hook(lambda _, given, out, path=path: after(path, out))
    return engine, calls


def one_step(engine: Engine) -> None:
    engine.backward(engine(batch(0, engine.mesh.rank())))
    engine.step()


def route(stage: int, mode: str, rules: Rules) -> tuple[list[float], Counter[str]]:
    """Return losses, and counts of calls and tokens by error. Logits have one dtype."""
    paths = [name.removesuffix(".weight") for name in ROUTERS]
    engine, calls = watched(stage, mode, rules, GPT(moe=True), paths)
    losses: list[float] = []
    counts: Counter[str] = Counter()
    for step in range(STEPS):
        masters = {name: engine.parameter(name).master for name in ROUTERS}
        loss = engine(batch(step, engine.mesh.rank(), samples=16))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        for path in paths:
            ((given, logits),) = calls[path]
            calls[path].clear()
            wide, master = given.float(), masters[f"{path}.weight"]
            exact, rounded = F.linear(wide, master), F.linear(wide, master.to(LOW[mode]).float())
            chosen, best = (each.float().topk(2).indices for each in (logits, exact))
            counts["rounded"] += not torch.equal(logits, exact.to(logits.dtype))
            counts["on rounded weights"] += torch.equal(logits.float(), rounded)
            counts["misrouted"] += int((chosen != best).any(-1).sum())
            counts["tokens"] += len(chosen)
            assert logits.dtype is (torch.float32 if rules else torch.bfloat16), "a matrix keeps its dtype"
    return losses, counts


@pytest.mark.second
@pytest.mark.parametrize("mode", FEW_MODES)
@pytest.mark.parametrize("stages", [(0, 3), pytest.param((0, 1, 2), marks=pytest.mark.slow)], ids=str)
@on_ranks(2)
def test_pinned_routers_choose_as_a_full_fp32_router_does(stages: tuple[int, ...], mode: str) -> None:
    runs = [route(stage, mode, PIN_ROUTERS) for stage in stages]
    assert all(run == runs[0] for run in runs), runs
    assert +runs[0][1] == {"tokens": STEPS * len(ROUTERS) * 16 * 12}, runs


@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16"])
@on_ranks(1)
def test_routers_that_are_not_pinned_choose_otherwise(mode: str) -> None:
    """The comparison above can fail: in bf16 some tokens go to other experts."""
    for stage in (0, 3):
        assert route(stage, mode, [])[1]["misrouted"] > 0


OTHER = "layers.0.attention.qkv.weight"
MOVED = ("all_gather", "reduce_scatter")


def fits(values: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    return torch.equal(values.to(dtype).to(values.dtype), values)


def dtypes_as_it_lands(engine: Engine, name: str) -> dict[str, Any]:
    """Record the dtypes of a parameter, of its gradient when that has landed, and of its module's input."""
    seen: dict[str, Any] = {}
    module = engine.module.get_submodule(name.removesuffix(".weight"))
    module.register_forward_pre_hook(lambda module, args: seen.update(input=args[0].dtype))

    def landed(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.update(parameter=parameter.dtype, gradient=parameter.grad.dtype)
        seen["gradient fits 16 bits"] = fits(parameter.grad)

    engine.module.get_parameter(name).register_post_accumulate_grad_hook(landed)
    return seen


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_pinned_router_is_fp32_in_every_column(mode: str) -> None:
    """The router is gathered, computed, accumulated, reduced and updated in fp32, unlike its neighbours."""
    low, autocast = LOW[mode], mode == "autocast-bf16"
    read = ("input", "parameter", "gradient", "reduced", "storage")
    pinned: dict[str, Any] = dict.fromkeys(read, torch.float32)
    pinned |= dict.fromkeys(("gradient fits 16 bits", "state fits 16 bits", "master fits 16 bits"), False)
    other: dict[str, Any] = dict.fromkeys(("parameter", "gradient", "reduced"), low)
    other |= {"storage": torch.float32 if autocast else low, "gradient fits 16 bits": mode != "fp16"}
    other |= {"state fits 16 bits": mode == "bf16", "master fits 16 bits": not autocast}
    # Gathered after the update, or at stage 3 before every forward and every backward.
    for stage, gathers in enumerate((2, 2, 2, 4)):
        engine = make(config_of(stage, mode, PIN_ROUTERS), GPT(moe=True))
        seen = {name: dtypes_as_it_lands(engine, name) for name in (ROUTERS[0], OTHER)}
        with engine.comm.record() as log:
            engine.backward(engine(batch(0, engine.mesh.rank())))
            for name, dtypes in seen.items():
                segment = engine.executor.segments[engine.plan.row(name).segment]
                dtypes |= {"reduced": segment.reduced.dtype, "storage": segment.storage.dtype}
            engine.step()
        for name, dtypes in seen.items():
            parameter = engine.parameter(name)
            dtypes["state fits 16 bits"] = all(fits(value) for value in parameter.state.values())
            dtypes["master fits 16 bits"] = fits(parameter.master, low)
        other["input"] = seen[OTHER]["input"]
        assert seen == {ROUTERS[0]: pinned, OTHER: other}, seen
        sent, planned = (
            Counter((each.op, str(each.dtype), each.numel) for each in calls if each.op in MOVED)
            for calls in (log, collectives(engine.plan))
        )
        assert sent == planned, (sent, planned)
        # Two routers of 128 elements, each padded to 512: nothing else has that size.
        routers = {key: count for key, count in sent.items() if key[2] == 512}
        assert routers == {("reduce_scatter", "fp32", 512): 2, ("all_gather", "fp32", 512): gathers}


@pytest.mark.cells(1)
@pytest.mark.parametrize("output", [None, "input", "keep"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_pinned_norms_return_their_inputs_dtype_and_heads_keep_theirs(
    stage: int, mode: str, output: str | None
) -> None:
    rules: Rules = [{"match": "*norm*", "pin": "fp32"}, {"match": "head.*", "pin": "fp32"}]
    if output:
        rules[1]["output"] = output
    engine, calls = watched(stage, mode, rules, GPT(tied=False), ["layers.0.norm1", "norm", "head"])
    held = whole_values(engine)["master"]
    one_step(engine)
    for path, ((given, out),) in calls.items():
        wide, weight = given.float(), held[f"{path}.weight"]
        if path == "head":
            exact = F.linear(wide, weight)
        else:
            exact = F.layer_norm(wide, (32,), weight, held[f"{path}.bias"])
        wanted = torch.float32 if path == "head" and output != "input" else given.dtype
        assert out.dtype is wanted and torch.equal(out, exact.to(wanted)), (path, given.dtype, out.dtype)


FINE = 1 + 2**-12
"""A value that is exact in fp32, and 1 in bf16 and in fp16."""


COMPILED = torch.compile(F.linear, backend="aot_eager")


class Uses(nn.Module):
    """A pinned matrix, bare or in a module, that is used outside of its module."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((8, 8), FINE))
        self.router = nn.Linear(8, 8, bias=False)
        nn.init.constant_(self.router.weight, FINE)
        self.other = nn.Linear(8, 8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x).float().sum() + 0 * self.other(x).float().sum()


USES: dict[str, Any] = {
    "matmul": lambda m, x: x @ m.gate,
    "a module's": lambda m, x: F.linear(x, m.router.weight),
    "transposed": lambda m, x: x @ m.gate.t(),
    "elementwise": lambda m, x: x * m.gate[0],
    "einsum": lambda m, x: torch.einsum("bi,io->bo", x, m.gate),
    "rows": lambda m, x: F.embedding(torch.tensor([0, 1]), m.gate),
    "part of a stack": lambda m, x: torch.bmm(x[None], m.gate[None][torch.tensor([0])]),
    "detached": lambda m, x: F.linear(x, m.gate.detach()) + (m.gate - FINE).sum(),
    "through data": lambda m, x: F.linear(x, m.gate.data) + (m.gate - FINE).sum(),
    "scaled": lambda m, x: F.linear(x, 2 * m.gate),
    "joined": lambda m, x: F.linear(x, torch.cat([m.gate[:4], m.gate[4:]])),
    "compiled": lambda m, x: COMPILED(x, m.gate),
}


@pytest.mark.second
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks there
@pytest.mark.parametrize("mode", FEW_MODES)
def test_a_pin_holds_wherever_the_parameter_is_used(mode: str) -> None:
    rules: Rules = [{"match": match, "pin": "fp32"} for match in ("gate", "router.*")]
    for name, use in USES.items():
        engine = make(config_of(3, mode, rules), Uses(use))
        loss = engine(torch.ones(1, 8))
        count = loss.item() / FINE
        assert count >= 4 and abs(count - round(count)) < 1e-6, name
        engine.backward(loss)
        gradient = engine.parameter("router.weight" if name == "a module's" else "gate").gradient
        assert gradient.abs().sum() > 0, name
        with engine.gathered():
            copied = copy.deepcopy(engine.module)
        assert type(copied.gate) is nn.Parameter
        engine.destroy()
        assert type(engine.module.gate) is nn.Parameter


def test_a_model_that_casts_a_pinned_parameter_itself_is_told_of_once() -> None:
    model = Uses(lambda m, x: x @ m.gate.to(x.dtype))
    engine = make(config_of(0, "bf16", [{"match": "gate", "pin": "fp32"}]), model)
    said = "`gate` is pinned to torch.float32, and the model itself casts it"
    with pytest.warns(UserWarning, match=said) as told:
        for _ in range(3):
            engine(torch.ones(1, 8))
    assert len(told) == 1
    engine.destroy()


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    model = nn.Linear(8, 8)
    model.odd = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"`odd`: must be of real floating numbers to be trained"):
        make(config_of(3, "bf16", []), model)
    for dtype in (torch.bool, torch.int32, torch.complex64):
        model = nn.Linear(8, 8)
        model.odd = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
        engine = make(config_of(3, "bf16", []), model)
        engine.backward(engine(torch.randn(2, 8)).sum())
        engine.step()
        assert torch.equal(engine.module.odd, torch.ones(4, dtype=dtype))
        engine.destroy()
