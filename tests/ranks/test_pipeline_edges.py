"""What a stranger's data, loop or model does to a pipeline: the right numbers, or one error that names it."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.numerics.networks import GPT
from tests.numerics.runs import config, make
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS, data, pipeline
from tests.ranks.harness import run_ranks
from tests.ranks.test_failures import Boom
from tests.ranks.ways import WAYS
from tests.unit.test_late_products import Own
from zerodrift.api import initialize
from zerodrift.engine.engine import Engine
from zerodrift.pipeline.cut import Parts
from zerodrift.pipeline.run import checksum


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- the same micro-batches on every stage ------------------------------------------------------------------


@dataclass
class Sample:
    tokens: torch.Tensor
    scale: float = 1.0


def changed(step: Any) -> list[Any]:
    """The same micro-batches with something else in one of them."""
    other = [tokens.clone() for tokens in step]
    other[2][0, 3] += 1
    return other


IN_A_BATCH = Parts(
    "layers",
    before=lambda model, batch: model.embed(batch["tokens"]),
    after=lambda model, hidden, batch: PARTS.after(model, hidden, batch["tokens"]) * batch["scale"],
)


def other_data() -> list[str]:
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS))
    other = engine.mesh.rank("pipeline") == 1 and engine.mesh.rank("data") == 0
    tokens = data(0, engine.mesh.rank("data"))
    found = [
        said(lambda: engine.train_batch(changed(tokens) if other else tokens)),
        said(lambda: engine.evaluate(changed(tokens) if other else tokens)),
        said(lambda: engine.train_batch(tokens[::-1] if other else tokens)),
        said(lambda: engine.train_batch(tokens, [2.0 if other else 1.0] * COUNT)),
        said(lambda: engine.train_batch(tokens, [1.0, float("nan"), 1.0, 1.0])),
        said(lambda: engine.train_batch(tokens, ["x"] * COUNT)),  # type: ignore[list-item]
        said(lambda: engine.train_batch(tokens)),  # and goes on
    ]
    engine.destroy()
    engine = initialize(
        GPT(LAYERS),
        config=config(0, "fp32", COUNT, pipeline={"stages": 2, "micro_batches": COUNT}),
        parts=IN_A_BATCH,
        device="cpu",
        quiet=True,
    )
    batches = [{"tokens": each, "scale": 1.0 + other} for each in tokens]
    found.append(said(lambda: engine.train_batch(batches)))
    engine.destroy()
    return found


def test_ranks_of_one_pipeline_with_different_data_are_an_error_on_all_ranks() -> None:
    """Two pipelines of two stages; in one of them a rank has other tokens, order, weights or numbers."""
    for found in run_ranks(other_data, 4):
        for text in (*found[:3], found[7]):
            assert text.startswith("ModelError: `micro_batches`: must be the same on every stage"), text
            assert "on rank 0, one with other contents on rank 2" in text
        assert "micro-batch 2" in found[0] and "micro-batch 0" in found[2]
        assert found[3].startswith("ModelError: `weights`: must be the same on every stage of a pipeline"), (
            found
        )
        assert "must be 4 finite numbers" in found[4] and "must be 4 finite numbers" in found[5]
        assert found[6] == ""


def test_a_checksum_sees_every_value_and_no_order_of_keys() -> None:
    tokens = torch.arange(12).view(3, 4)
    one: list[Any] = [
        tokens, tokens.t(), tokens.clone().t().contiguous(), tokens.float(), tokens.view(4, 3),
        tokens.flip(0), tokens.bfloat16(), {"a": tokens}, {"b": tokens}, [tokens],
        (tokens, 1), (tokens, 2), (tokens, "1"),
        Sample(tokens), Sample(tokens, 2.0), None, torch.tensor([float("nan")]), torch.empty(0),
    ]  # fmt: skip
    sums = [checksum(each) for each in one]
    assert sums[1] == sums[2]
    assert len(set(sums)) == len(one) - 1
    for mapping in (OrderedDict, UserDict, dict):
        pair = mapping({"x": tokens, "y": 1}), mapping({"y": 1, "x": tokens})
        assert checksum(pair[0]) == checksum(pair[1]) == checksum({"x": tokens, "y": 1})


# --- hooks on weights, under every schedule -----------------------------------------------------------------


def hooks_on(model: nn.Module) -> None:
    """Of the kinds that people put on weights: masks, clipping, and for when a gradient was added."""
    for name, parameter in model.named_parameters():
        if "up.weight" in name:
            parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        elif "down.weight" in name:
            mask = torch.arange(parameter.numel()).view_as(parameter) % 2

            def masked(leaf: torch.Tensor, mask: torch.Tensor = mask) -> None:
                assert leaf.grad is not None
                leaf.grad.mul_(mask.to(leaf.grad.dtype))

            parameter.register_post_accumulate_grad_hook(masked)
        elif "norm" in name:
            parameter.register_hook(lambda grad: grad * 2)


def hooked_everywhere() -> dict[str, dict[str, torch.Tensor]]:
    """Hooks that were there before, and hooks that come after the first step."""
    found = {}
    for later in (False, True):
        for schedule, weights in WAYS if not later else WAYS[4:6]:
            model = GPT(LAYERS, tied=False)
            if not later:
                hooks_on(model)
            engine = pipeline(config(0, "fp32", COUNT), schedule, weights, model)
            if later:
                engine.accumulate(data(0, 0))
                engine.zero_grad()
                hooks_on(engine.module)
            engine.accumulate(data(0, 0))
            found[f"{schedule} {weights} {later}"] = {
                row.name: engine.parameter(row.name).gradient for row in engine.plan.rows
            }
            engine.destroy()
    return found


def hooked_alone() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = GPT(LAYERS, tied=False)
    hooks_on(model)
    for tokens in data(0, 0):
        model(tokens).backward()
    return {name: value.grad / COUNT for name, value in model.named_parameters() if value.grad is not None}


def test_hooks_on_weights_hold_under_every_schedule() -> None:
    (alone,) = run_ranks(hooked_alone, 1)
    first, _ = run_ranks(hooked_everywhere, 2, timeout=120.0)
    for way, seen in first.items():
        assert [name for name, value in alone.items() if not torch.equal(seen[name], value)] == [], way


# --- weights that are pinned or of a class of their own, under every schedule -------------------------------

PINNED: list[dict[str, Any]] = [{"match": pattern, "pin": "fp32"} for pattern in ("*.up.*", "*.qkv.*")]


def of_classes() -> nn.Module:
    """Layers whose weights are pinned, of a class of their own, or neither."""
    model = GPT(LAYERS, tied=False)
    for name, parameter in model.named_parameters():
        if "down" in name:
            parameter.__class__ = Own
    return model


def classes_everywhere() -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for schedule, weights in WAYS[3:]:
        written = config(0, "bf16", COUNT, precision={"rules": PINNED})
        engine = pipeline(written, schedule, weights, of_classes())
        engine.accumulate(data(0, 0))
        found[f"{schedule} {weights}"] = {
            row.name: engine.parameter(row.name).gradient for row in engine.plan.rows
        }
        engine.destroy()
    return found


def classes_alone() -> tuple[dict[str, torch.Tensor], list[str]]:
    torch.set_num_threads(1)
    engine = make(config(0, "bf16", COUNT, precision={"rules": PINNED}), of_classes())
    for tokens in data(0, 0):
        engine.backward(engine(tokens))
    found = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
    pinned = [row.name for row in engine.plan.rows if row.columns.pinned]
    engine.destroy()
    return found, pinned


def test_weights_of_another_class_have_their_gradients_under_every_schedule() -> None:
    """Those that are pinned bit for bit; a queue does not round the others' products to bf16."""
    ((alone, pinned),) = run_ranks(classes_alone, 1)
    assert len(pinned) >= 2 * LAYERS and all(value.any() for value in alone.values())
    first, _ = run_ranks(classes_everywhere, 2, timeout=120.0)
    for way, gradients in first.items():
        far = [
            name
            for name, value in alone.items()
            if (gradients[name] - value).norm() > (0.0 if name in pinned else 3e-3) * value.norm()
        ]
        assert far == [], way


# --- what a piece sends, and what a step says ---------------------------------------------------------------


class Shortens(nn.Module):
    """A layer that goes on with less of what it is given, as its data says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made[: int(x.detach().sum() > 0) + 1]


STACK = Parts("", before=lambda model, x: x, after=lambda model, hidden, x: hidden.square().mean())


def stack(layer: Callable[[], nn.Module], parts: Parts = STACK, count: int = 2) -> Engine:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(layer(), layer())
    written = config(0, "fp32", count, pipeline={"stages": 2, "micro_batches": count})
    return initialize(model, config=written, parts=parts, device="cpu", quiet=True)


def block() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8)))


def sends() -> list[str]:
    found = []
    engine = stack(Shortens)
    found.append(said(lambda: engine.train_batch([torch.ones(2, 8), -torch.ones(2, 8)])))
    engine.destroy()
    bad = Parts("", before=lambda model, x: x, each=lambda layer, x, b: {"x": layer(x)}, after=STACK.after)  # type: ignore[arg-type]
    engine = stack(block, bad)
    found.append(said(lambda: engine.train_batch([torch.ones(2, 8)] * 2)))
    engine.destroy()
    return found


def test_a_piece_checks_what_it_sends() -> None:
    first, second = run_ranks(sends, 2)
    assert first[0].startswith(
        "ModelError: `hidden`: must have the same shapes and dtypes in every micro-batch"
    )
    assert "[1, 8] torch.float32 from piece 0 for micro-batch 1, and [2, 8] torch.float32 before" in first[0]
    assert first[1].startswith("ModelError: `hidden`: must be a tensor or a tuple of tensors")
    for text in second:
        assert (
            text.startswith("RankError: `pipeline`: ")
            and "got ModelError: `hidden`" in text
            and "on rank 0" in text
        )


def means() -> tuple[float, float, float, list[str]]:
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS))
    plain = engine.train_batch(data(0, 0))
    weights = [0.5, 1.0, 1.5, 3.0]
    weighted = engine.train_batch(data(1, 0), weights)
    expected = sum(w * loss for w, loss in zip(weights, weighted.losses, strict=True)) / COUNT
    tree = engine.module
    engine.destroy()
    left = [
        name
        for name, module in tree.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    ]
    left += [name for name, each in tree.named_parameters() if each._post_accumulate_grad_hooks]
    return plain.loss - sum(plain.losses) / COUNT, weighted.loss, expected, left


def test_the_loss_of_a_step_has_its_weights_and_destroy_leaves_no_hook() -> None:
    for none, loss, expected, left in run_ranks(means, 2):
        assert none == 0 and loss == expected and left == []


def bf16_norms_left() -> list[str]:
    """Boundaries of a precision that a rule pins, under a schedule that puts weight gradients off."""
    rules = [{"match": "*norm*", "pin": "fp32"}]
    engine = pipeline(config(0, "bf16", COUNT, precision={"rules": rules}), "zbv", "queue", GPT(LAYERS))
    tree = engine.module
    engine.train_batch(data(0, 0))
    engine.destroy()
    return [
        name for name, module in tree.named_modules() if module._forward_hooks or module._forward_pre_hooks
    ]


def test_destroy_takes_the_casts_of_pieces_off() -> None:
    assert run_ranks(bf16_norms_left, 2) == [[], []]


# --- dropout ------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.nn.functional.dropout(torch.ones(64), 0.5, self.training) > 0
        self.masks.append(kept)
        made: torch.Tensor = self.inner(x)
        return made * kept.float().mean()


def dropped() -> tuple[list[torch.Tensor], bool, torch.Tensor]:
    engine = stack(Dropping)
    layer = next(module for module in engine.module.modules() if isinstance(module, Dropping))
    torch.manual_seed(7)
    for _ in range(2):
        engine.train_batch([torch.ones(2, 8)] * 2)
    drawn = torch.rand(4)
    masks = layer.masks[1:]  # the first learns shapes
    engine.destroy()
    engine = stack(block)
    torch.manual_seed(7)
    engine.train_batch([torch.ones(2, 8)] * 2)
    same = torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(7)))
    engine.destroy()
    return masks, same, drawn


def test_dropout_differs_between_stages_micro_batches_and_steps() -> None:
    (first, same, drawn), (second, also, after) = run_ranks(dropped, 2)
    masks = [*first, *second]
    assert len(masks) == 8 and len({tuple(mask.tolist()) for mask in masks}) == 8
    assert same and also, "what draws nothing leaves the generator alone"
    assert torch.equal(drawn, after), "ranks that were seeded alike stay so"


# --- a rank that raises, or is killed -----------------------------------------------------------------------


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))
        self.armed: Callable[[], Any] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.armed()
        made: torch.Tensor = self.inner(x)
        return made


def boom() -> None:
    raise Boom("mine") from ValueError("and its own cause")


def ends(folder: str) -> tuple[str, bool]:
    engine = stack(Raises)
    engine.train_batch([torch.ones(2, 8)] * 2)
    layer = next(module for module in engine.module.modules() if isinstance(module, Raises))
    text = os.path.join(folder, f"{engine.mesh.rank()}")
    streams = [os.dup(2), os.open(text, os.O_CREAT | os.O_WRONLY)]
    os.dup2(streams[1], 2)
    if engine.mesh.rank() == 1:
        layer.armed = boom
    found = said(lambda: engine.train_batch([torch.ones(2, 8)] * 2))
    os.dup2(streams[0], 2)
    with open(text, encoding="utf-8") as file:
        return found, "chedule" in file.read()


def test_a_rank_that_raises_ends_with_its_own_exception_and_nothing_else(tmp_path: Any) -> None:
    (waited, dumped), (raised, also) = run_ranks(ends, 2, str(tmp_path))
    assert raised == "Boom: mine"
    assert "got Boom: mine on rank 1" in waited and waited.startswith("RankError: `pipeline`")
    assert not dumped and not also


def test_a_rank_that_is_killed_ends_the_others_with_a_rank_error() -> None:
    """Three stages of which the middle one is gone."""
    first, _, last = run_ranks(ends_after_a_kill, 3, dying=[1])
    assert first.startswith("RankError: `") and last.startswith("RankError: `"), (first, last)


def ends_after_a_kill() -> str:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(Raises(), Raises(), Raises())
    written = config(0, "fp32", 3, pipeline={"stages": 3, "micro_batches": 3})
    engine = initialize(model, config=written, parts=STACK, device="cpu", quiet=True)
    engine.train_batch([torch.ones(2, 8)] * 3)
    rank = engine.mesh.rank()
    if rank == 1:
        model[1].armed = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return said(lambda: engine.train_batch([torch.ones(2, 8)] * 3))
