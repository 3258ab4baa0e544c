"""Faults of precision to plant in a model, a config or its micro-batches, and what an audit must name first.

To plant another: an entry in `PLANTED`. `around` changes the forward of one module, `ruled` narrows a
parameter by a rule, and any function of a model can do what it likes with it. The twin without the fault has
the same architecture, mode and `common` config, and an audit must find nothing in it.
"""

from __future__ import annotations

import fnmatch
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.audit.networks import LENGTH, VOCABULARY, Decoder, Pictures
from zerodrift.inspect.audit.results import AuditFinding

Batches = list[dict[str, torch.Tensor]]
Plant = Callable[[nn.Module], Any]
"""Function that changes a model in place."""

MODES = ("fp32", "bf16", "autocast-bf16", "fp16")


@dataclass(frozen=True)
class Healthy:
    """A model, micro-batches for it, and a config, with nothing that an audit should find."""

    build: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    routers: str = ""
    """Glob of the router parameters, which are pinned."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def config(self, mode: str, *more: Mapping[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        if mode == "fp16":  # a dynamic scale that begins where gradients overflow
            given["fp16"] = {"enabled": True, "initial_scale_power": 24}
        rules = [{"match": self.routers, "pin": "fp32"}] if self.routers else []
        for each in more:
            rules = [] if "unpinned" in each else rules + each.get("rules", [])
            given |= {key: value for key, value in each.items() if key not in ("rules", "unpinned")}
        blocks = {key: given.pop(key) for key in ("optimizer", "fp16") if key in given}
        return {**blocks, "precision": {"mode": mode, **given, **({"rules": rules} if rules else {})}}


def words(vocabulary: int, length: int = LENGTH, count: int = 4) -> Batches:
    generator = torch.Generator().manual_seed(1)
    made = (torch.randint(0, vocabulary, (4, length), generator=generator) for _ in range(count))
    return [{"input_ids": ids, "labels": ids} for ids in made]


def _images() -> Batches:
    generator, made = torch.Generator().manual_seed(1), []
    for _ in range(4):
        images = torch.randn(4, 3, 96, 96, generator=generator) + 0.5
        made.append({"images": images, "labels": torch.randint(0, 10, (4,), generator=generator)})
    return made


def _tiny(name: str) -> nn.Module:
    from tests.models import architectures

    return getattr(architectures, f"_{name}")()


def _of_transformers(name: str, routers: str = "") -> Healthy:
    return Healthy(functools.partial(_tiny, name), functools.partial(words, 97), routers)


HEALTHY: dict[str, Healthy] = {
    "llama": _of_transformers("llama"),
    "gpt-oss": _of_transformers("gpt_oss", "*.router.*"),
    "qwen3-moe": _of_transformers("qwen3_moe", "*.mlp.gate.*"),
    "deepseek-v3": _of_transformers("deepseek_v3", "*.mlp.gate.*"),
    "decoder": Healthy(Decoder, functools.partial(words, VOCABULARY)),
    "deep decoder": Healthy(functools.partial(Decoder, 8), functools.partial(words, VOCABULARY)),
    "pictures": Healthy(Pictures, _images),
}


@dataclass(frozen=True)
class Planted:
    """One fault, and the finding that must come first."""

    name: str
    on: str
    """Key of HEALTHY."""
    mode: str
    kinds: tuple[str, ...]
    """Admitted kinds of the first finding."""
    where: str
    """Glob of the first finding's `where`."""
    plant: Plant = lambda model: None
    fault: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `precision`, whole blocks by their names, and `unpinned`: no router is pinned."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the same form that the healthy twin has too."""
    batches: Callable[[], Batches] | None = None
    """Micro-batches other than those of the healthy model."""

    def model(self) -> nn.Module:
        model = HEALTHY[self.on].model()
        self.plant(model)
        return model

    def config(self) -> dict[str, Any]:
        return HEALTHY[self.on].config(self.mode, self.common, self.fault)

    def healthy(self) -> tuple[str, dict[str, Any]]:
        """Return the architecture, and the config without the fault."""
        return self.on, HEALTHY[self.on].config(self.mode, self.common)

    def data(self) -> Batches:
        return (self.batches or HEALTHY[self.on].batches)()

    def first(self, findings: Sequence[AuditFinding]) -> bool:
        """Whether the first finding is this one."""
        if not findings:
            return False
        found = findings[0]
        return found.kind in self.kinds and fnmatch.fnmatchcase(found.where, self.where)


# --- how to plant ----------------------------------------------------------------------------------------


def around(path: str, change: Callable[..., Any]) -> Plant:
    """Replace the forward of a module by `change(module, its own forward, *args, **kwargs)`."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        own = type(module).forward

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return change(self, functools.partial(own, self), *args, **kwargs)

        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]

    return plant


def ruled(name: str, **columns: str) -> dict[str, Any]:
    """Return a rule that narrows one parameter."""
    return {"rules": [{"match": name, **columns}]}


def valued(path: str, values: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Give a parameter other initial values, as a trained one may have."""

    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            held = model.get_parameter(path)
            held.copy_(values(held))

    return plant


# --- what is planted -------------------------------------------------------------------------------------


def given_in(dtype: torch.dtype) -> Callable[..., Any]:
    """Return a forward that rounds its input."""
    return lambda self, own, x, *args, **kwargs: own(x.to(dtype).to(x.dtype), *args, **kwargs)


def left_in_bf16(self: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    out = own(*args, **kwargs)
    return out.to(torch.bfloat16).to(out.dtype)


def _shares_in_fp16(self: nn.Module, own: Any, scores: torch.Tensor) -> torch.Tensor:
    powers = (scores.half() * 30).exp()
    return (powers / powers.sum(-1, keepdim=True)).to(scores.dtype)


def _stale(self: Any, own: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "cast"):
        self.cast = self.weight.detach().bfloat16()
    return functional.linear(x, self.cast.to(x.dtype))


def _large_inside(self: nn.Module, own: Any, x: torch.Tensor) -> torch.Tensor:
    """Exceed the range of fp16 in an intermediate value."""
    return own(x) * 3e6 / 3e6


def _untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _table_in_bf16(model: Any) -> None:
    model.table = model.table.bfloat16()


def _clipped_hook(path: str) -> Plant:
    """Clip gradients in a hook, without regard to the loss scale."""

    def clip(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * min(1.0, 1.0 / float(gradient.float().norm()))

    def hooked(self: Any, own: Any, x: torch.Tensor, *args: Any) -> Any:
        out = own(x, *args)
        if out.requires_grad:
            out.register_hook(clip)
        return out

    return around(path, hooked)


def _cancelling() -> Batches:
    """Return the same images with every label in turn, whose gradients cancel in an untrained network."""
    images = _images()[0]["images"]
    return [{"images": images, "labels": torch.full((4,), label)} for label in range(10)]


CODE = ("narrow code",)


def by_code(name: str, on: str, mode: str, path: str, change: Callable[..., Any], **rest: Any) -> Planted:
    """Plant a fault into the code of a module."""
    kinds = rest.pop("kinds", CODE)
    return Planted(name, on, mode, kinds, f"{path} at *", around(path, change), **rest)


def by_rule(name: str, on: str, where: str, **columns: str) -> Planted:
    """Plant a rule that narrows a parameter, in fp32."""
    return Planted(name, on, "fp32", ("rounded",), where, fault=ruled(where, **columns))


ATTENTION, GATE = "blocks.0.attention", "model.layers.1.mlp.gate"

PLANTED: tuple[Planted, ...] = (
    Planted("router-by-rule", "gpt-oss", "fp32", ("rounded", "routing"), "model.layers.0.mlp.router.weight",
        fault=ruled("model.layers.0.mlp.router.*", storage="bf16", gather="bf16", compute="bf16")),
    by_code("router-in-code-of-a-bf16-plan", "deepseek-v3", "bf16", GATE, given_in(torch.bfloat16)),
    Planted("router-unpinned", "gpt-oss", "bf16", ("rounded", "routing"), "model.layers.*.mlp.router.weight",
        fault={"unpinned": True}),
    Planted("router-values-rounded", "deepseek-v3", "bf16", ("rounded",), f"{GATE}.weight",
        valued(f"{GATE}.weight", lambda values: values.bfloat16())),
    by_rule("one-of-a-module", "gpt-oss", "model.layers.0.mlp.experts.down_proj_bias", compute="bf16"),
    by_rule("norm-by-rule", "llama", "model.norm.weight", storage="bf16", compute="bf16"),
    by_code("embedding-in-code", "decoder", "fp32", "words", left_in_bf16),
    by_rule("head-by-rule", "deepseek-v3", "lm_head.weight", compute="bf16"),
    Planted("accumulate-of-one", "decoder", "fp32", ("accumulate",), "head.weight",
        fault={"allow_narrow": True, **ruled("head.weight", accumulate="bf16", reduce="fp32")}),
    Planted("wire-of-gradients-that-cancel", "pictures", "fp32", ("reduce",), "*",
        fault={"reduce": "bf16"}, batches=_cancelling),
    Planted("underflow-without-a-loss-scale", "decoder", "fp16", ("gradient",), "*",
        fault={"fp16": {"enabled": True, "loss_scale": 1e-4}}),
    Planted("stuck-momentum", "decoder", "bf16", ("stuck state",), "*",
        fault={"state": "bf16"}, common={"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}),
    Planted("no-master", "llama", "bf16", ("lost updates",), "*", fault={"master": "same"},
        common={"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}),
    Planted("softmax-overflows", "decoder", "fp32", ("overflow",), "blocks.1.attention.shares at *",
        around("blocks.1.attention.shares", _shares_in_fp16)),
    Planted("untied", "llama", "bf16", ("untied",), "lm_head.weight", _untied),
    Planted("table-in-bf16", "decoder", "fp32", ("narrow buffer",), "table", _table_in_bf16),
    Planted(
        "buffers-cast", "llama", "bf16", ("narrow buffer",), "model.rotary_emb.*", fault={"buffers": "bf16"},
    ),
    Planted("clip-of-scaled-gradients", "decoder", "fp16", ("gradient",), "norm.*", _clipped_hook("norm")),
    Planted("stale-copy", "decoder", "fp32", (*CODE, "no gradient"), f"{ATTENTION}.out*",
        around(f"{ATTENTION}.out", _stale)),
    by_code("one-of-eight-layers", "deep decoder", "fp32", "blocks.5.stream", left_in_bf16),
    by_code("beyond-fp16", "decoder", "fp16", "blocks.0.down", _large_inside, kinds=("overflow",)),
    by_code("fp8-in-code", "decoder", "bf16", "blocks.1.up", given_in(torch.float8_e4m3fn)),
)  # fmt: skip
