"""What the engine hooks is what the plan lists, and that is what a walk over the modules finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT
from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from zerodrift import MeshShape, Plan, build, load, resolve
from zerodrift.api import initialize
from zerodrift.dtypes import DType
from zerodrift.engine.step import compute
from zerodrift.errors import ModelError
from zerodrift.model.module import from_module
from zerodrift.plan.boundaries import PROJECTIONS
from zerodrift.plan.table import Boundary, Row

MODES = ("bf16", "fp16", "autocast-bf16")
PATTERNS: dict[str, list[str]] = {
    "routers": ["*router*", "*.gate.*"],
    "norms": ["*norm*"],
    "heads": ["lm_head.*", "*embed_tokens.*"],
    "attention": ["*attn*"],
    "one layer": ["*layers.1.*"],
    "all layers": ["*layers.*"],
    "all": ["*"],
}


def planned(module: nn.Module, patterns: list[str], mode: str, **told: Any) -> Plan:
    names = [name for name, _ in module.named_parameters()]
    used = [p for p in patterns if any(nn_glob(p, name) for name in names)]
    rules = [{"match": pattern, "pin": "fp32", **told} for pattern in used]
    written = load(config(0, mode, precision={"rules": rules}))
    return build(resolve(written, MeshShape()), from_module(module), MeshShape())


def nn_glob(pattern: str, name: str) -> bool:
    from fnmatch import fnmatchcase

    return fnmatchcase(name, pattern)


def walked(module: nn.Module, plan: Plan) -> Iterator[tuple[str, DType, str, DType | None]]:
    """The boundaries by an independent walk down the tree of modules that are there."""
    rows = {name: row for row in plan.rows for name in row.names}
    mode = plan.policy.mode

    def visit(path: str, part: nn.Module) -> Iterator[tuple[str, DType, str, DType | None]]:
        prefix = f"{path}." if path else ""
        inside = [rows[prefix + name] for name, _ in part.named_parameters(remove_duplicate=False)]
        found = apart(inside)
        if found is not None and path and type(part).forward is not nn.Module.forward:
            told = {row.columns.output for row in inside} - {None}
            projects = PROJECTIONS.fullmatch(path.rpartition(".")[2]) is not None
            matrices = sum(len(row.shape) > 1 for row in inside)
            keeps = "keep" in told if told else matrices == 1 and not projects
            lookup = None if mode.autocast or "keep" in told else mode.dtype
            yield path, found, "keep" if keeps else "input", lookup
            return
        for name, child in part.named_children():
            yield from visit(prefix + name, child)

    def apart(inside: list[Row]) -> DType | None:
        if not inside or (mode.autocast and not all(row.columns.pinned for row in inside)):
            return None
        dtypes = {row.columns.compute for row in inside}
        return dtypes.pop() if len(dtypes) == 1 and mode.dtype not in dtypes else None

    return visit("", module)


def told(boundary: Boundary) -> tuple[str, DType, str, DType | None]:
    return boundary.path, boundary.dtype, boundary.output, boundary.lookup


def hooked(module: nn.Module) -> set[str]:
    """Paths of the modules that cast."""
    return {
        path
        for path, part in module.named_modules(remove_duplicate=False)
        for hook in part._forward_pre_hooks.values()
        if getattr(hook, "_call", hook).__module__ == compute.__name__
    }


def model(name: str) -> nn.Module:
    if name == "gpt":
        return GPT(moe=True)
    pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")
    from tests.models.architectures import ARCHITECTURES

    with torch.device("meta"):
        return ARCHITECTURES[name].build()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpt", "llama", "gpt-oss", "qwen3-moe", "deepseek-v3"])
def test_the_plan_lists_what_a_walk_over_the_modules_finds(name: str, mode: str) -> None:
    module = model(name)
    some = False
    for patterns in PATTERNS.values():
        for rule in ({}, {"output": "keep"}, {"output": "input"}):
            plan = planned(module, patterns, mode, **rule)
            assert sorted(map(told, plan.boundaries), key=str) == sorted(walked(module, plan), key=str)
            some = some or bool(plan.boundaries)
    assert some


@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16"])
@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS.keys())
def test_the_engine_hooks_what_the_plan_lists(patterns: list[str], mode: str) -> None:
    module = GPT(moe=True)
    names = [name for name, _ in module.named_parameters()]
    used = [p for p in patterns if any(nn_glob(p, name) for name in names)]
    rules = [{"match": pattern, "pin": "fp32"} for pattern in used]
    engine = make(config(1, mode, precision={"rules": rules}), module)
    try:
        assert hooked(module) == {each.path for each in engine.plan.boundaries}
        assert hooked(module) or not used
    finally:
        engine.destroy()
    assert not hooked(module)


# --- a model that is not the plan's -----------------------------------------------------------------------


def boundary(path: str, **changes: Any) -> Boundary:
    why = (("dtype", "a rule"), ("output", "a rule"))
    return Boundary(path, DType.FP32, changes.get("output", "keep"), None, why)


def test_a_boundary_at_no_module_is_refused() -> None:
    module = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 2)])})
    for path, got in (("gone", "got no such module"), ("list", "got ModuleList, which is never called")):
        with pytest.raises(ModelError, match=f"`{path}`: must be a module with a forward, .*{got}"):
            compute.attach(module, [boundary(path)])
    assert len(compute.attach(module, [boundary("list.0")])) == 2


def test_a_module_in_two_places_is_hooked_once() -> None:
    norm = nn.LayerNorm(4)
    module = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(norm)})
    assert len(compute.attach(module, [boundary("a.0"), boundary("b.0")])) == 2
    with pytest.raises(ModelError, match=r"`b\.0`: must be a module of its own, .*otherwise by 'a\.0'"):
        compute.attach(module, [boundary("a.0"), boundary("b.0", output="input")])


class Twice(nn.Module):
    """A norm that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(8)
        self.a = nn.Sequential(nn.Linear(8, 8), norm)
        self.b = nn.Sequential(nn.Linear(8, 8), norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.a(x)
        assert between.dtype is torch.bfloat16
        return self.b(between).float().square().mean()


def test_a_norm_that_two_blocks_share_returns_its_inputs_dtype_in_both() -> None:
    engine = make(config(0, "bf16", precision={"rules": [{"match": "*.1.*", "pin": "fp32"}]}), Twice())
    assert [each.path for each in engine.plan.boundaries] == ["a.1", "b.1"]
    engine.backward(engine(torch.randn(4, 8)))
    engine.step()
    engine.destroy()


# --- over a pipeline --------------------------------------------------------------------------------------

ONE_PIECE: list[dict[str, Any]] = [
    {"match": "model.layers.1.*", "pin": "fp32"},
    {"match": "model.norm.*", "pin": "fp32"},
]
"""All that the second piece has of the base model."""


def micro_batches() -> list[dict[str, torch.Tensor]]:
    from tests.models.architectures import tokens

    return [{"input_ids": tokens(micro), "labels": tokens(micro)} for micro in range(2)]


def losses_of_pieces() -> tuple[list[float], list[str], list[str]]:
    from tests.models.architectures import ARCHITECTURES

    torch.set_num_threads(1)
    written = config(0, "bf16", 2, precision={"rules": ONE_PIECE}, pipeline={"stages": 2, "micro_batches": 2})
    engine = initialize(ARCHITECTURES["llama"].model(), config=written, device="cpu", quiet=True)
    casting = [path for piece in engine.executor.forwards for path in sorted(hooked(piece.module))]
    planned = [each.path for each in engine.plan.boundaries]
    losses = engine.train_batch(micro_batches()).losses
    engine.destroy()
    return losses, casting, planned


def losses_of_the_whole() -> list[float]:
    from tests.models.architectures import ARCHITECTURES

    torch.set_num_threads(1)
    engine = make(config(0, "bf16", 2, precision={"rules": ONE_PIECE}), ARCHITECTURES["llama"].model())
    losses = [engine(**batch).loss.item() for batch in micro_batches()]
    engine.destroy()
    return losses


def test_a_piece_that_is_pinned_as_a_whole_computes_what_the_whole_model_computes() -> None:
    pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")
    (alone,) = run_ranks(losses_of_the_whole, 1)
    first, last = run_ranks(losses_of_pieces, 2)
    assert first[1] == [] and last[1] == last[2] == ["model.layers.1", "model.norm"]
    assert [float(loss) for loss in last[0]] == alone
