"""Traces of a step without values, of small models, and what is found in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rich.cells import cell_len
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerodrift.api import make_plan
from zerodrift.errors import ModelError
from zerodrift.inspect.check.compare import computes, hidden, nondeterministic
from zerodrift.inspect.trace.dry_run import trace
from zerodrift.inspect.trace.operations import flops_of
from zerodrift.model.inputs import Inputs, inputs_for
from zerodrift.plan.table import Plan
from zerodrift.plan.trace import Trace
from zerodrift.report.trace import trace_text

WIDTH = 16


def plan_of(model: nn.Module, mode: str = "bf16", **precision: Any) -> Plan:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return make_plan({"precision": {"mode": mode, **precision}, "optimizer": optimizer}, model)


def traced(model: nn.Module, mode: str = "bf16", inputs: Inputs | None = None, **precision: Any) -> Trace:
    return trace(plan_of(model, mode, **precision), model, inputs or inputs_for(model))


# --- what torch refuses --------------------------------------------------------------------------------

Call = Callable[[torch.Tensor, torch.Tensor], Any]


class Calls(nn.Module):
    """A model with one call of a function of its input, in the mode's dtype and in fp32, [4, 4] each."""

    def __init__(self, call: Call, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x * self.weight, x.float())


def _first() -> torch.Tensor:
    return torch.arange(4)


REFUSED: dict[str, Call] = {
    "mm": lambda x, y: F.linear(x, y),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "convolution": lambda x, y: F.conv1d(x[None], y[..., None]),
    "_grouped_mm": lambda x, y: F.grouped_mm(
        x.repeat(4, 8), y.repeat(8, 8)[None].repeat(2, 1, 1), offs=torch.tensor([2, 16], dtype=torch.int32)
    ),
    "linalg_cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "index_add_": lambda x, y: x.clone().index_add_(0, _first(), y),
    "index_put_": lambda x, y: x.clone().index_put_((_first(),), y),
    "scatter_add_": lambda x, y: x.clone().scatter_add_(0, _first()[None], y),
    "masked_scatter_": lambda x, y: x.clone().masked_scatter_(torch.ones(4, 4, dtype=torch.bool), y),
    "_embedding_bag": lambda x, y: F.embedding_bag(
        torch.zeros(1, 2, dtype=torch.int64), x, per_sample_weights=y[:1, :2], mode="sum"
    ),
    "grid_sampler_2d": lambda x, y: F.grid_sample(x[None, None], y[None, :, :2, None].movedim(3, 1)),
    "complex": lambda x, y: torch.complex(x, y),
    "nll_loss_forward": lambda x, y: F.nll_loss(x, _first(), y[0]),
    "_cdist_forward": lambda x, y: torch.cdist(x, y),
    "native_layer_norm": lambda x, y: F.layer_norm(y, (4,), x[0], x[0]),
    "native_batch_norm": lambda x, y: F.batch_norm(y, None, None, x[0], x[0], training=True),
}
ACCEPTED: dict[str, Call] = {
    "add": lambda x, y: x + y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "copy": lambda x, y: x.clone().copy_(y),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), y[0], y[0]),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, y[0], y[0], training=True),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused_without_values(call: Call) -> None:
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


# --- models --------------------------------------------------------------------------------------------

Middle = Callable[[Any, torch.Tensor], torch.Tensor]


def plain(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.second(model.first(x))


class Tokens(nn.Module):
    """A model from token ids to a loss; tests replace `middle` and further modules."""

    def __init__(self, middle: Middle = plain, **modules: nn.Module) -> None:
        super().__init__()
        self.middle, self.embedding = middle, nn.Embedding(64, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 64)
        for name, module in modules.items():
            setattr(self, name, module)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self, self.embedding(input_ids)))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1).float(), labels.flatten())


def known_numbers() -> Tokens:
    """Read numbers that do not depend on weights."""
    order = torch.arange(4)

    def middle(model: Any, x: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(4, dtype=torch.int64)
        for _ in range(int(model.count)):
            x = model.first(x)
        for place in order.tolist():
            sums[place] += place
        seen = sums.sum() == 6 and model.scale.item() == 0.5 and torch.rand(()) < 2
        return model.second(x) if seen else x

    made = Tokens(middle)
    made.register_buffer("count", torch.tensor(2))
    made.register_buffer("scale", torch.tensor(0.5))
    return made


def known_mask(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Write and read by a mask that does not depend on weights."""
    mask = torch.arange(x.shape[1])[None] < 4
    y = model.first(x)
    y[mask] = model.second.bias
    return y + y[mask].sum()


def looks(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.first(x) if x.mean() > 0 else x


def unknown_mask(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Read by a mask that depends on weights, whose backward has an unknown shape."""
    return plain(model, x).index_put((x > 0,), model.first.bias[:1] * 2)


def catches(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Try a product that torch refuses, and go on without it."""
    try:
        return model.second(x * torch.ones(WIDTH))
    except RuntimeError:
        return model.first(x)


class Tuple(Tokens):
    def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        x = self.logits(input_ids)
        return x, {"ids": input_ids, "sums": [x.sum()]}


SHAPES: dict[str, Callable[[], Tokens]] = {
    "tuple": Tuple,
    "recurrent": lambda: Tokens(
        lambda m, x: plain(m, m.rnn(x)[0]), rnn=nn.LSTM(WIDTH, WIDTH, batch_first=True)
    ),
    "recomputed": lambda: Tokens(lambda model, x: checkpoint(plain, model, x, use_reentrant=False)),
    "catches": lambda: Tokens(catches),
}


def router(shares: Middle) -> Tokens:
    """Return a model with a router whose shares weight its product."""

    def middle(model: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(model, x) * shares(model, x).softmax(-1).sum(-1, keepdim=True).to(x.dtype)

    return Tokens(middle, router=nn.Linear(WIDTH, 4, bias=False))


PIN = [{"match": "router.weight", "pin": "fp32"}]


def kinds(model: nn.Module, mode: str = "bf16", **precision: Any) -> list[tuple[str, str]]:
    plan = plan_of(model, mode, **precision)
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
    frozen = traced(Tokens().requires_grad_(False))
    assert frozen.loss == "" and not any(each.backward for each in frozen.operations)


def test_a_constant_in_fp32_makes_the_next_product_refused_and_under_autocast_a_promotion() -> None:
    rotates = Tokens(lambda model, x: model.second(model.first(x) * torch.ones(WIDTH)))
    before = torch.is_autocast_enabled("cpu"), torch.get_rng_state().tolist()
    assert kinds(rotates) == [("refused", "second")]
    refused = traced(rotates).refused
    assert refused is not None and refused.name == "linear" and refused.inputs == ("bf16", "fp32")
    assert kinds(rotates, "autocast-bf16") == [("promotion", "")] and kinds(rotates, "fp32") == []
    assert (torch.is_autocast_enabled("cpu"), torch.get_rng_state().tolist()) == before
    assert torch.ones(2).sum().item() == 2.0, "nothing of the run stays"


@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16"])
def test_a_pinned_router_computes_in_fp32_however_it_is_used(mode: str) -> None:
    for shares in (lambda m, x: m.router(x), lambda m, x: F.linear(x, m.router.weight * 2)):
        assert set(computes(traced(router(shares), mode, rules=PIN))["router.weight"]) == {"fp32"}
        assert ("pin cast", "router.weight") not in kinds(router(shares), mode, rules=PIN)


def test_a_pin_that_the_model_casts_is_found() -> None:
    cast = router(lambda m, x: F.linear(x, m.router.weight.to(torch.bfloat16)))
    assert kinds(cast, rules=PIN) == [("pin cast", "router.weight"), ("compute", "router.weight")]
    assert ("pin cast", "router") in kinds(router(lambda m, x: m.router(x).to(torch.bfloat16)), rules=PIN)


def test_numbers_and_masks_that_do_not_depend_on_weights_may_be_looked_at() -> None:
    shown = traced(known_numbers())
    assert [each.call for each in shown.operations if each.module == "first" and not each.backward] == [0, 1]
    assert any(each.module == "second" for each in shown.operations)
    assert traced(Tokens(known_mask)).refused is None


@pytest.mark.parametrize(("middle", "at"), [(looks, ""), (unknown_mask, " in its backward")])
def test_control_flow_of_the_model_itself_names_the_model_and_the_line(middle: Middle, at: str) -> None:
    told = rf"`model \(Tokens\)`: must not depend on values.*{at} at test_trace\.py:\d+\. Write"
    with pytest.raises(ModelError, match=told):
        traced(Tokens(middle))


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (lambda x: x * x.sum().item(), "one number of a tensor"),
        (lambda x: x[x > 0], "which elements are not zero"),
        (lambda x: {}["nothing there"], "KeyError: 'nothing there'"),
    ],
)
def test_what_cannot_be_followed_is_one_error_with_module_and_line(does: Any, what: str) -> None:
    part = Calls(lambda x, _: does(x), 1)
    with pytest.raises(ModelError) as raised:
        traced(Tokens(lambda model, x: model.part(x), part=part))
    assert raised.value.where == "part (Calls)" and raised.value.do
    assert what in raised.value.got and " at test_trace.py:" in raised.value.got


@pytest.mark.parametrize("model", SHAPES)
def test_other_shapes_of_models(model: str) -> None:
    shown = traced(SHAPES[model]())
    assert shown.refused is None and any(each.backward for each in shown.operations)
    seen = [each for each in shown.operations if each.module == "first" and not each.backward]
    assert len(seen) == 1, "what is computed again in the backward is not told twice"


# --- inputs --------------------------------------------------------------------------------------------


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


NORM = [{"match": "norm.*", "pin": "fp32", "output": "input"}]


def test_a_function_gives_inputs() -> None:
    given = inputs_for(Pictures(), f"{__name__}:named")
    assert given.words == f"{__name__}:named: pictures 2 x 3 x 8 x 8 float32, scale"
    shown = traced(Pictures(), inputs=given, rules=NORM)
    assert shown.loss == "the sum of what the model returns" and shown.refused is None


def test_inputs_that_do_not_fit_are_one_error() -> None:
    with pytest.raises(ModelError, match="must run on tensors without values; got TypeErr"):
        traced(Pictures(), "fp32", Inputs((), {"images": pictures()}, ""))
    with pytest.raises(ModelError, match="a dict of arguments, a tuple of them, or a "):
        inputs_for(Pictures(), f"{__name__}:number")


# --- findings ------------------------------------------------------------------------------------------


def widened(change: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
    """Return a model that changes a hidden state in bf16, and goes on in bf16."""
    return Tokens(lambda model, x: model.second(change(model.first(x)).to(x.dtype)))


def ones() -> torch.Tensor:
    return torch.ones(WIDTH)


PROMOTED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "by a constant": (lambda y: y * ones(), True),
    "through results": (lambda y: (y * ones()).exp() + 1, True),
    "in place": (lambda y: y.clone().mul_(ones()), True),
    "in a write": (lambda y: torch.empty_like(y).copy_(y * ones()), True),
    "by a number": (lambda y: y * torch.tensor(2.0), False),
    "asked for": (lambda y: y.float(), False),
}


@pytest.mark.parametrize("case", PROMOTED)
def test_a_value_that_is_widened_and_rounded_is_found(case: str) -> None:
    change, found = PROMOTED[case]
    assert kinds(widened(change)) == [("promotion", "")] * found


def test_a_column_that_is_not_as_planned_is_found() -> None:
    wide = Tokens(lambda m, x: plain(m, x) + F.linear(x.float(), m.first.weight.float()).to(x.dtype))
    assert ("compute", "first.weight") in kinds(wide)
    unused = kinds(Tokens(spare=nn.Linear(2, 2)))
    assert unused == [("unused", "spare.weight"), ("unused", "spare.bias")]


VARYING: dict[str, tuple[Call, str]] = {
    "samples": (lambda x, y: F.grid_sample(x[None, None], x[None, :, :2, None].movedim(3, 1)), "`gather`"),
    "pooling": (lambda x, y: F.adaptive_avg_pool2d(x[None, None], 2), "refused by torch under"),
    "histogram": (lambda x, y: x.sum() + torch.histc(y).sum(), "whole numbers"),
    "histogram of numbers": (lambda x, y: x.sum() + torch.histc(_first().float()).sum(), ""),
    "median": (lambda x, y: x.median(0).values, "`kthvalue`"),
    "median of all": (lambda x, y: x.median(), ""),
    "cumsum": (lambda x, y: x.cumsum(0), ""),
}


@pytest.mark.parametrize("case", VARYING)
def test_operations_without_the_same_bits_are_named_for_cuda_alone(case: str) -> None:
    call, says = VARYING[case]
    model = Calls(call)
    rank, tree = (plan_of(model, reduce={"order": order}) for order in ("rank", "tree"))
    seen = trace(tree, model, Inputs((torch.eye(4),), {}, "x"))
    assert not list(nondeterministic(tree, seen, "cpu")) and not list(nondeterministic(rank, seen, "cuda"))
    named = list(nondeterministic(tree, seen, "cuda"))
    assert len(named) == bool(says)
    assert not says or says in f"{named[0].what} {named[0].do}"


@pytest.mark.parametrize("width", [50, 100])
def test_the_text_joins_neighbours_and_fits_the_terminal_whatever_the_names(width: int) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = Tokens(lambda m, x: plain(m, m.layers(x)), layers=layers)
    model.add_module("very_long_name_of_a_module_indeed" * 4, nn.Linear(WIDTH, WIDTH))
    plan, seen = plan_of(model), traced(model)
    text = trace_text(plan, seen, hidden(plan, seen), color=False, width=width)
    assert "\x1b" not in text and max(map(cell_len, text.splitlines())) <= width
    assert any(line.split()[1:3] == ["x3", "bf16"] for line in text.splitlines())


def test_shapes_that_a_formula_of_torch_refuses_have_no_flops() -> None:
    heads = [torch.ones(1, count, 4, 8) for count in (2, 3, 3)]
    assert (
        flops_of(torch.ops.aten._scaled_dot_product_flash_attention.default, tuple(heads), {}, None) is None
    )
