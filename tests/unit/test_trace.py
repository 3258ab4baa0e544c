"""A dry run of small models: what runs, and where; what is refused, and what it cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerodrift.api import make_plan
from zerodrift.errors import ModelError
from zerodrift.inspect.check.hidden import computes, hidden
from zerodrift.inspect.trace.dry_run import trace
from zerodrift.inspect.trace.fake_run import NORMS, ONE_DTYPE
from zerodrift.model.inputs import Inputs, inputs_for
from zerodrift.model.sources import build_runnable
from zerodrift.plan.table import Plan
from zerodrift.plan.trace import Trace

WIDTH = 16
aten: Any = torch.ops.aten


def planned(model: nn.Module, mode: str = "bf16", **precision: Any) -> Plan:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return make_plan({"precision": {"mode": mode, **precision}, "optimizer": optimizer}, model)


def traced(model: nn.Module, mode: str = "bf16", inputs: Inputs | None = None, **precision: Any) -> Trace:
    return trace(planned(model, mode, **precision), model, inputs or inputs_for(model))


# --- what torch refuses -------------------------------------------------------------------------------


class Calls(nn.Module):
    """One call of a function, on 4 x 4 in the mode's dtype and 4 x 4 in fp32."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x * self.weight, x.float())


def _first() -> torch.Tensor:
    return torch.arange(4)


REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "mm": lambda x, y: F.linear(x, y),
    "bmm": lambda x, y: torch.einsum("bij,bjk->bik", x[None], y[None]),
    "addmm": lambda x, y: F.linear(x, x, y[0]),
    "baddbmm": lambda x, y: torch.baddbmm(y[None], x[None], x[None]),
    "addbmm": lambda x, y: torch.addbmm(y, x[None], x[None]),
    "mv": lambda x, y: torch.mv(x, y[0]),
    "addmv": lambda x, y: torch.addmv(y[0], x, x[0]),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "vdot": lambda x, y: torch.vdot(x[0], y[0]),
    "convolution": lambda x, y: F.conv1d(x[None], y[..., None]),
    "_grouped_mm": lambda x, y: F.grouped_mm(
        x.repeat(4, 8), y.repeat(8, 8)[None].repeat(2, 1, 1), offs=torch.tensor([2, 16], dtype=torch.int32)
    ),
    "linalg_cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "index_add": lambda x, y: x.index_add(0, _first(), y),
    "index_add_": lambda x, y: x.clone().index_add_(0, _first(), y),
    "index_copy": lambda x, y: x.index_copy(0, _first(), y),
    "index_copy_": lambda x, y: x.clone().index_copy_(0, _first(), y),
    "index_put": lambda x, y: x.index_put((_first(),), y),
    "index_put_": lambda x, y: x.clone().index_put_((_first(),), y),
    "_unsafe_index_put": lambda x, y: aten._unsafe_index_put(x, [_first()], y),
    "_index_put_impl_": lambda x, y: aten._index_put_impl_(x.clone(), [_first()], y),
    "scatter": lambda x, y: x.scatter(0, _first()[None], y),
    "scatter_": lambda x, y: x.clone().scatter_(0, _first()[None], y),
    "scatter_add": lambda x, y: x.scatter_add(0, _first()[None], y),
    "scatter_add_": lambda x, y: x.clone().scatter_add_(0, _first()[None], y),
    "masked_scatter": lambda x, y: x.masked_scatter(torch.ones(4, 4, dtype=torch.bool), y),
    "masked_scatter_": lambda x, y: x.clone().masked_scatter_(torch.ones(4, 4, dtype=torch.bool), y),
    "_embedding_bag": lambda x, y: F.embedding_bag(
        torch.zeros(1, 2, dtype=torch.int64), x, per_sample_weights=y[:1, :2], mode="sum"
    ),
    "grid_sampler_2d": lambda x, y: F.grid_sample(x[None, None], y[None, :, :2, None].movedim(3, 1)),
    "grid_sampler_3d": lambda x, y: F.grid_sample(x[None, None, None], y[None, None, None, :, :3]),
    "polar": lambda x, y: torch.polar(x, y),
    "complex": lambda x, y: torch.complex(x, y),
    "nll_loss_forward": lambda x, y: F.nll_loss(x, _first(), y[0]),
    "nll_loss2d_forward": lambda x, y: F.nll_loss(x[None, :, None], _first()[None, None], y[0]),
    "_cdist_forward": lambda x, y: torch.cdist(x, y),
    "_linalg_solve_ex": lambda x, y: torch.linalg.solve(y, x),
    "native_layer_norm": lambda x, y: F.layer_norm(y, (4,), x[0], x[0]),
    "native_group_norm": lambda x, y: F.group_norm(y, 2, x[0], x[0]),
    "native_batch_norm": lambda x, y: F.batch_norm(y, None, None, x[0], x[0], training=True),
}
BEFORE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "prelu": lambda x, y: F.prelu(x, y[0]),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "bilinear": lambda x, y: F.bilinear(x, x, y[None]),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]),
    "convolution": lambda x, y: F.conv1d(x[None], x[..., None], y[0]),
}
"""What torch's forms without values refuse, too, or a function before it runs an operation."""
ACCEPTED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "outer": lambda x, y: torch.outer(x[0], y[0]),
    "copy": lambda x, y: x.clone().copy_(y),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), y[0], y[0]),
    "group_norm": lambda x, y: F.group_norm(x, 2, y[0], y[0]),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, y[0], y[0], training=True),
    "rms_norm": lambda x, y: F.rms_norm(x, (4,), y[0]),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "masked_fill": lambda x, y: x.masked_fill(x > 0, y[0, 0]),
    "maximum": lambda x, y: torch.maximum(x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "solve_triangular": lambda x, y: torch.linalg.solve_triangular(y, x, upper=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", [*REFUSED.values(), *BEFORE.values()], ids=[*REFUSED, *BEFORE])
def test_what_torch_refuses_is_refused_without_values(
    call: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    x = torch.eye(4)
    with pytest.raises((RuntimeError, NotImplementedError)):
        call(x.bfloat16(), x)
    refused = traced(Calls(call), inputs=Inputs((x,), {}, "x")).refused
    assert refused is not None and set(refused.inputs) == {"bf16", "fp32"}
    assert refused.line.startswith("test_trace.py:")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_torch_takes_is_no_refusal(name: str) -> None:
    x = torch.eye(4)
    ACCEPTED[name](x.bfloat16(), x)
    assert traced(Calls(ACCEPTED[name]), inputs=Inputs((x,), {}, "x")).refused is None


def test_every_operation_of_the_list_was_tried() -> None:
    assert REFUSED.keys() == ONE_DTYPE | (NORMS - {"_native_batch_norm_legit"})


# --- models -------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Token ids in, a loss out; `middle` is what tests replace."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part
        self.embedding = nn.Embedding(64, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.part is None else self.part(x)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.middle(self.embedding(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Rotates(Tokens):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * torch.ones(WIDTH))


class Known(Tokens):
    """Looks at numbers that do not depend on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(2))
        self.register_buffer("scale", torch.tensor(0.5))
        self.order = torch.arange(4)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(4, dtype=torch.int64)
        for _ in range(int(self.count)):
            x = self.first(x)
        for place in self.order.tolist():
            sums[place] += place
        seen = sums.sum() == 6 and self.scale.item() == 0.5 and torch.rand(()) < 2
        return self.second(x) if seen else x


class KnownMask(Tokens):
    """Writes and reads where a mask is that does not depend on weights."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[1])[None] < 4
        y = self.first(x)
        y[mask] = self.second.bias
        return y + y[mask].sum()


class Unlike(Tokens):
    """A mask that depends on weights has a backward of unknown shape."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        y = y.index_put((x > 0,), self.first.bias[:1] * 2)
        return y


class Catches(Tokens):
    """Tries a product that torch refuses, and goes on without it."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.second(x * torch.ones(WIDTH))
        except RuntimeError:
            return self.first(x)


class Scripted(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.jit.script(nn.GELU())

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(super().middle(x))


class Sparse(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH, sparse=True)


class Leaves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)


class Looks(Tokens):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if x.mean() > 0 else x


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Masks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("nothing there")


class Tuple(Tokens):
    def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        x = self.head(self.middle(self.embedding(input_ids)))
        return x, {"ids": input_ids, "sums": [x.sum()]}


class Recurrent(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.rnn(x)[0]))


class Recomputed(Tokens):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().middle, x, use_reentrant=False)


class Router(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x) * self.shares(x).sum(-1, keepdim=True).to(x.dtype)

    def shares(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x).softmax(-1)


class RouterCast(Router):
    def shares(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.router.weight.to(torch.bfloat16)).softmax(-1)


class RouterRounded(Router):
    def shares(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x).to(torch.bfloat16).softmax(-1)


class RouterFunctional(Router):
    def shares(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.router.weight * 2).softmax(-1)


PIN = [{"match": "router.weight", "pin": "fp32"}]


def kinds(model: nn.Module, mode: str = "bf16", **precision: Any) -> list[tuple[str, str]]:
    plan = planned(model, mode, **precision)
    return [(each.kind, each.name) for each in hidden(plan, trace(plan, model, inputs_for(model)))]


def test_a_plain_model_shows_its_operations_by_module_and_nothing_is_found() -> None:
    assert kinds(Tokens()) == []
    shown = traced(Tokens())
    (first,) = [each for each in shown.operations if each.module == "first" and not each.backward]
    assert first.name == "addmm" and {tensor.dtype for tensor in first.inputs} == {"bf16"}
    assert first.line.startswith("test_trace.py:")
    backward = {each.name for each in shown.operations if each.module == "first" and each.backward}
    assert {"mm", "sum"} <= backward
    assert shown.loss == "the first output that is one number" and shown.refused is None


def test_a_constant_in_fp32_makes_the_next_product_refused_and_under_autocast_a_promotion() -> None:
    assert kinds(Rotates()) == [("refused", "second")]
    refused = traced(Rotates()).refused
    assert refused is not None and refused.name == "linear" and refused.inputs == ("bf16", "fp32")
    assert kinds(Rotates(), "autocast-bf16") == [("promotion", "")]
    assert kinds(Rotates(), "fp32") == []


@pytest.mark.parametrize("mode", ["bf16", "fp16", "autocast-bf16"])
def test_a_pinned_router_computes_in_fp32_however_it_is_used(mode: str) -> None:
    for model in (Router, RouterFunctional):
        assert set(computes(traced(model(), mode, rules=PIN))["router.weight"]) == {"fp32"}
        assert ("pin cast", "router.weight") not in kinds(model(), mode, rules=PIN)


def test_a_pin_that_the_model_casts_is_found() -> None:
    assert kinds(RouterCast(), rules=PIN) == [("pin cast", "router.weight"), ("compute", "router.weight")]
    assert ("pin cast", "router") in kinds(RouterRounded(), rules=PIN)


def test_numbers_and_masks_that_do_not_depend_on_weights_may_be_looked_at() -> None:
    shown = traced(Known())
    assert [each.call for each in shown.operations if each.module == "first" and not each.backward] == [0, 1]
    assert any(each.module == "second" for each in shown.operations)
    shown = traced(KnownMask())
    assert shown.refused is None and "first.weight" in computes(shown)


@pytest.mark.parametrize(("model", "at"), [(Looks, ""), (Unlike, " in its backward")])
def test_control_flow_of_the_model_itself_names_the_model_and_the_line(model: type[Tokens], at: str) -> None:
    told = rf"`model \({model.__name__}\)`: must not let values decide .*{at} at test_trace\.py:\d+\. Write"
    with pytest.raises(ModelError, match=told):
        traced(model())


@pytest.mark.parametrize(
    ("part", "path", "what"),
    [
        (Item, "part (Item)", "one number of a tensor"),
        (Masks, "part (Masks)", "which elements are not zero"),
        (Raises, "part (Raises)", "KeyError: 'nothing there'"),
        (Leaves, "part (Leaves)", "SystemExit: 3"),
    ],
)
def test_what_cannot_be_followed_is_one_error_with_module_and_line(
    part: type[nn.Module], path: str, what: str
) -> None:
    with pytest.raises(ModelError) as raised:
        traced(Tokens(part()))
    assert raised.value.where == path
    assert what in raised.value.got and " at test_trace.py:" in raised.value.got
    assert raised.value.do


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("model", [Tuple, Recurrent, Recomputed, Catches, Scripted, Sparse])
def test_other_shapes_of_models(model: type[Tokens]) -> None:
    shown = traced(model())
    assert shown.refused is None and any(each.backward for each in shown.operations)
    seen = [each for each in shown.operations if each.module == "first" and not each.backward]
    assert len(seen) == 1, "what is computed again in the backward is not told twice"


def test_a_model_without_gradients_has_no_backward() -> None:
    shown = traced(Tokens().requires_grad_(False))
    assert shown.loss == "" and not any(each.backward for each in shown.operations)


def test_nothing_of_the_run_stays() -> None:
    warned = torch.is_autocast_enabled("cpu"), torch.initial_seed()
    model = Tokens()
    state = torch.get_rng_state()
    traced(model, "autocast-bf16")
    assert (torch.is_autocast_enabled("cpu"), torch.initial_seed()) == warned
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.ones(2).sum().item() == 2.0


# --- inputs -------------------------------------------------------------------------------------------


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, pictures: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.convolution(pictures))).mean((2, 3))) * scale


def pictures() -> torch.Tensor:
    return torch.zeros(2, 3, 8, 8)


def named() -> dict[str, Any]:
    return {"pictures": pictures(), "scale": 2.0}


def number() -> int:
    return 3


def test_a_forward_that_says_nothing_is_refused_by_name() -> None:
    with pytest.raises(
        ModelError, match=r"`Pictures`: must have example inputs .* `forward\(pictures: "
    ) as raised:
        inputs_for(Pictures())
    assert "--inputs package.module:function" in str(raised.value)


def test_a_function_gives_inputs() -> None:
    rules = [{"match": "norm.*", "pin": "fp32", "output": "input"}]
    given = inputs_for(Pictures(), "tests.unit.test_trace:pictures")
    assert given.words == "tests.unit.test_trace:pictures: 0 2 x 3 x 8 x 8 float32"
    assert traced(Pictures(), inputs=given, rules=rules).loss == "the sum of what the model returns"
    given = inputs_for(Pictures(), "tests.unit.test_trace:named")
    assert given.words == "tests.unit.test_trace:named: pictures 2 x 3 x 8 x 8 float32, scale"
    assert traced(Pictures(), inputs=given, rules=rules).refused is None
    with pytest.raises(
        ModelError, match="must return a dict of arguments, a tuple of them, or a tensor; got int"
    ):
        inputs_for(Pictures(), "tests.unit.test_trace:number")


def test_inputs_that_do_not_fit_are_one_error() -> None:
    with pytest.raises(ModelError, match=r"must run on tensors without values; got TypeError: .*--inputs"):
        traced(Pictures(), "fp32", Inputs((), {"images": pictures()}, ""))


class Stack(nn.Module):
    """Experts that no machine of a test holds."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(1 << 12, 1 << 14, 1 << 14))


def stack() -> nn.Module:
    return Stack()


def test_a_model_larger_than_any_memory_can_be_run() -> None:
    model = build_runnable(f"{__name__}:stack")
    assert {name: parameter.is_meta for name, parameter in model.named_parameters()} == {"experts": True}
