"""Mismatches between a trainer and a sampler, planted one at a time, and the findings of `drift`.

A plant changes the sampler: the tensors of its folder, its table of dtypes, and its module. Its
log-probabilities are computed by torch alone, from the folder's tensors, and handed to `drift` as recorded
ones.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from zerodrift.inspect.audit.tokens import parse_recorded as recorded
from zerodrift.inspect.drift.attribution import SamplerSide, SideComparison, compare_sides
from zerodrift.inspect.drift.sampler import parse_sampler_dtypes as sampler
from zerodrift.inspect.drift.trainer import load_trainer as trainer

VOCABULARY, LENGTH, SEQUENCES = 96, 24, 4
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# --- architectures ----------------------------------------------------------------------------------------


class RotaryTable(nn.Module):
    """Cosines and sines in a buffer of the state dict."""

    inv_freq: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, size, 2) / size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(x.shape[1])[:, None].float() * self.inv_freq.float()
        return angles.cos().repeat(1, 2).to(x.dtype), angles.sin().repeat(1, 2).to(x.dtype)


class PlainNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class PlainAttention(nn.Module):
    """Attention step by step: products, a softmax in fp32."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = (_turned(part, *table) for part in (q, k))
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        above = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = functional.softmax(
            scores.masked_fill(above, torch.finfo(scores.dtype).min), dim=-1, dtype=torch.float32
        )
        return self.out(torch.matmul(weights.to(q.dtype), v).transpose(1, 2).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class PlainExperts(nn.Module):
    """A top-1 mixture of experts, each a matrix with a bias."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(size, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        value, chosen = self.router(x).float().softmax(-1).topk(1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        of_chosen = every.gather(-2, chosen[..., None].expand(*chosen.shape, every.shape[-1]))[..., 0, :]
        return of_chosen * value.to(x.dtype)


class PlainBlock(nn.Module):
    def __init__(self, size: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = PlainNorm(size), PlainNorm(size)
        self.attn = PlainAttention(size, heads)
        dense = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.mlp = PlainExperts(size, experts) if experts else dense

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm1(x), table)
        return x + self.mlp(self.norm2(x))


class PlainDecoder(nn.Module):
    """A decoder without a library."""

    def __init__(self, experts: int = 0, size: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size)
        self.rotary = RotaryTable(size // heads)
        self.layers = nn.ModuleList(PlainBlock(size, heads, experts) for _ in range(2))
        self.norm = PlainNorm(size)
        self.head = nn.Linear(size, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        table = self.rotary(x)
        for layer in self.layers:
            x = layer(x, table)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            flat = logits[:, :-1].float().reshape(-1, VOCABULARY)
            loss = functional.cross_entropy(flat, labels[:, 1:].reshape(-1))
        return SimpleNamespace(loss=loss, logits=logits)


def _library(name: str) -> nn.Module:
    from tests.models.architectures import ARCHITECTURES

    return ARCHITECTURES[name].model()


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "plain": PlainDecoder,
    "plain-moe": functools.partial(PlainDecoder, experts=4),
    "llama-tied": functools.partial(_library, "llama"),
    **{name: functools.partial(_library, name) for name in ("gpt-oss", "qwen3-moe", "deepseek-v3")},
}


def lively(name: str, seed: int = 0) -> nn.Module:
    """Make a model whose every part changes the output, unlike a freshly initialized one."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name]()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() < 2 or "bias" in path:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.train()


# --- what a sampler has -----------------------------------------------------------------------------------


@dataclass
class PlantedSide:
    """A trainer, and a sampler that a plant changes."""

    model: nn.Module
    config: dict[str, Any] = field(default_factory=lambda: {"precision": {"mode": "fp32"}})
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the sampler's folder; a tied one is in it once."""
    table: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = FP32
    """Compute dtype of the sampler."""
    changes: list[Callable[[nn.Module], Any]] = field(default_factory=list)
    """Changes of the sampler's module with its tensors; each may return a context for the forward."""
    logits: Callable[[Tensor], Tensor] = Tensor.float
    first: tuple[str, ...] = ()
    """Names of which one must be the first finding."""
    explained: bool = True
    """Whether the sampler's log-probabilities are of the tensors in its folder."""

    def __post_init__(self) -> None:
        taken: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in taken:
                taken.add(id(tensor))
                self.tensors[name] = tensor.detach().clone()

    def named(self, *parts: str, dims: int = 0) -> str:
        """Return the first tensor whose name has all these parts."""
        of_dims = (name for name, tensor in self.tensors.items() if not dims or tensor.dim() == dims)
        return _some(name for name in of_dims if all(part in name for part in parts))

    def in_bf16(self) -> None:
        """Use a trainer in bf16 with a correct export."""
        self.config = {"precision": {"mode": "bf16"}}
        self.dtype = BF16
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and name in dict(self.model.named_parameters()):
                self.tensors[name] = tensor.bfloat16()

    def logprobs(self, folder: Path, ids: Tensor) -> list[list[float]]:
        """Return the log-probabilities of the sampler itself, computed without zerodrift."""
        held = load_file(folder / "model.safetensors")
        for name in [name for name in held if name.endswith("_scale")]:
            scale = held.pop(name)
            held[name.removesuffix("_scale")] = held[name.removesuffix("_scale")].float() * scale
        model = copy.deepcopy(self.model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in held.items():
            if name in parameters:
                tied = [n for n, p in parameters.items() if p is parameters[name] and n not in held]
                for each in (name, *tied):
                    path, _, attribute = each.rpartition(".")
                    parameter = nn.Parameter(tensor.to(self.dtype))
                    setattr(model.get_submodule(path), attribute, parameter)
            else:
                dict(model.named_buffers())[name].copy_(tensor)
        with contextlib.ExitStack() as stack, torch.no_grad():
            for change in self.changes:
                around = change(model)
                if around is not None:
                    stack.enter_context(around)
            logits = self.logits(model(input_ids=ids).logits[:, :-1])
        chosen = logits.log_softmax(-1).double().gather(-1, ids[:, 1:, None])[..., 0]
        return chosen.tolist()


# --- plants -----------------------------------------------------------------------------------------------

Plant = Callable[[PlantedSide], None]


def head_in_bf16(side: PlantedSide) -> None:
    side.in_bf16()
    side.config["precision"]["rules"] = [{"match": _head(side), "pin": "fp32"}]
    side.table, side.first = {"compute": "bf16"}, ("head", "head weights")


def head_in_fp32(side: PlantedSide) -> None:
    side.in_bf16()
    name = _head(side)
    side.tensors[name] = side.model.state_dict()[name].clone()

    def change(model: nn.Module) -> None:
        head = model.get_submodule(name.removesuffix(".weight"))
        head.weight = nn.Parameter(side.tensors[name])
        head.register_forward_pre_hook(lambda module, args: (args[0].float(),))

    side.changes.append(change)
    side.table, side.first = {"head": "fp32"}, ("head",)


def router_in_bf16(side: PlantedSide) -> None:
    side.in_bf16()
    pattern = _router(side).rpartition(".")[0].replace(".0.", ".*.").replace(".1.", ".*.") + ".*"
    side.config["precision"]["rules"] = [{"match": pattern, "pin": "fp32"}]
    side.table, side.first = {"router": "bf16"}, ("router", "router weights")


def rounded(side: PlantedSide, parts: tuple[str, ...], *first: str) -> None:
    """Send all tensors in bf16 whose names have one of these parts."""
    names = [name for name in side.tensors if any(part in name for part in parts)]
    side.tensors |= {name: side.tensors[name].bfloat16() for name in (_some(names), *names)}
    side.first = first


def swapped(side: PlantedSide) -> None:
    name = _matrix(side, "layers.0.")
    other = name.replace("layers.0.", "layers.1.")
    if other not in side.tensors or side.tensors[other].shape != side.tensors[name].shape:
        raise LookupError("its layers differ")
    side.tensors[name], side.tensors[other] = side.tensors[other], side.tensors[name]
    side.first = (name, other)


def untied(side: PlantedSide) -> None:
    side.first = (_some(name for name in side.model.state_dict() if name not in side.tensors),)
    whole = side.model.state_dict()[side.first[0]]
    side.tensors[side.first[0]] = whole + 1e-2 * torch.randn_like(whole)


def experts_permuted(side: PlantedSide) -> None:
    side.first = (side.named("experts", "proj", dims=3),)
    side.tensors[side.first[0]] = side.tensors[side.first[0]].roll(1, 0)


def expert_dropped(side: PlantedSide) -> None:
    side.first = (side.named("experts.1.", "weight"),)
    side.tensors[side.first[0]].zero_()


def buffers_rounded(side: PlantedSide) -> None:
    def change(model: nn.Module) -> None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.bfloat16())

    side.changes.append(change)
    side.table, side.first = {"buffers": "bf16"}, ("buffers",)


def rotary_in_bf16(side: PlantedSide) -> None:
    def change(model: nn.Module) -> None:
        for module in model.modules():
            if "Rotary" in type(module).__name__:
                module.register_forward_hook(
                    lambda module, args, output: tuple(part.bfloat16().to(part.dtype) for part in output)
                )

    side.changes.append(change)
    side.table, side.first = {"rotary": "bf16"}, ("rotary",)


def in_plain(side: PlantedSide, key: str, dtype: str, change: Callable[[nn.Module], Any]) -> None:
    """Change the code of the plain decoder only, whose functions of torch are known."""
    if not isinstance(side.model, PlainDecoder):
        raise LookupError("its code is a library's")
    side.changes.append(change)
    side.table, side.first = {key: dtype}, (key,)


def kv_in_fp8(model: nn.Module) -> Any:
    """Round keys and values, which are on the right of the attention's products."""
    plain, fp8 = torch.matmul, torch.float8_e4m3fn
    return mock.patch.object(torch, "matmul", lambda a, b: plain(a, b.to(fp8).to(b.dtype)))


def softmax_in_bf16(model: nn.Module) -> Any:
    soft = functional.softmax

    def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
        return soft(x.bfloat16(), dim=dim).to(dtype or x.dtype) if x.dim() == 4 else soft(x, dim, dtype=dtype)

    return mock.patch.object(functional, "softmax", softmax)


def logprobs_in_bf16(side: PlantedSide) -> None:
    side.logits = Tensor.bfloat16
    side.table, side.first = {"logprobs": "bf16"}, ("logprobs",)


def missing(side: PlantedSide) -> None:
    name = _matrix(side)
    del side.tensors[name]
    side.first, side.explained = (name,), False


def rounded_at_random(values: Tensor) -> Tensor:
    """Round at random, as a stochastic export does."""
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) & -65536).view(FP32).bfloat16()


def without_subnormals(values: Tensor) -> Tensor:
    half = values.half()
    return torch.where(half.abs() < torch.finfo(FP16).tiny, 0, half)


SENT: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "stale": (FP32, lambda t: t + 1e-3 * torch.randn_like(t)),
    "stale_in_bf16": (BF16, lambda t: (t + 3e-3 * torch.randn_like(t)).bfloat16()),
    "rounded_twice": (BF16, lambda t: t.half().bfloat16()),
    "stochastic": (BF16, rounded_at_random),
    "cut_off": (BF16, lambda t: (t.view(torch.int32) & -65536).view(FP32).bfloat16()),
    "narrow_on_the_way": (FP32, lambda t: t.bfloat16().float()),
    "forgotten_factor": (FP32, lambda t: t * 0.7071),
    "subnormals_lost": (FP32, without_subnormals),
    "overflows": (FP32, Tensor.half),
    "saturated": (FP32, lambda t: t.clamp(-65504, 65504).half()),
}
"""A plant in one matrix: the trainer's dtype, and what becomes of the trained values on the way."""


def one_matrix(side: PlantedSide, name: str) -> None:
    dtype, change = SENT[name]
    if dtype is BF16:
        side.in_bf16()
    matrix = _matrix(side)
    trained = dict(side.model.named_parameters())[matrix].detach()
    if name == "subnormals_lost":
        trained.mul_(1e-3)
    elif name in ("overflows", "saturated"):  # everything is sent in fp16
        trained.view(-1)[5] = 1e5
        for each, held in side.model.state_dict().items():
            if each in side.tensors:
                side.tensors[each] = held.half() if held.is_floating_point() else held.clone()
    side.tensors[matrix] = change(trained)
    side.first = (matrix,)


def scaled(side: PlantedSide, dtype: torch.dtype, largest: float, dims: int | None) -> None:
    """Send one matrix in codes of a narrow dtype with scales of its rows, or with one for all."""
    name = _matrix(side)
    tensor = side.tensors[name]
    top = tensor.abs().max().reshape(1) if dims is None else tensor.abs().amax(dims, keepdim=True)
    scale = top / largest
    codes = tensor / scale
    side.tensors[name] = (codes if dtype.is_floating_point else codes.round()).to(dtype)
    side.tensors[f"{name}_scale"] = scale
    side.first = (f"{'attention' if 'attn' in name else 'mlp'} weights",)


PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        *(head_in_bf16, head_in_fp32, router_in_bf16, swapped),
        *(untied, experts_permuted, expert_dropped, buffers_rounded),
        *(rotary_in_bf16, logprobs_in_bf16, missing),
    )
}
PLANTS |= {name: functools.partial(one_matrix, name=name) for name in SENT}
PLANTS |= {
    "norms_rounded": lambda side: rounded(side, ("norm",), "norms weights"),
    "embedding_rounded": lambda side: rounded(side, ("embed",), "embedding weights", "head weights"),
    "router_rounded": lambda side: rounded(side, (".router.weight", ".gate.weight"), "router weights"),
    "kv_in_fp8": lambda side: in_plain(side, "kv", "fp8_e4m3", kv_in_fp8),
    "softmax_in_bf16": lambda side: in_plain(side, "softmax", "bf16", softmax_in_bf16),
    "int8_scaled": lambda side: scaled(side, torch.int8, 127, -1),
    "fp8_scaled": lambda side: scaled(side, torch.float8_e4m3fn, 448, None),
}


def _some(names: Iterable[str]) -> str:
    """Return the first name; without one there is no place for a plant."""
    for name in names:
        return name
    raise LookupError("no tensor is suitable")


def _head(side: PlantedSide) -> str:
    return _some(name for name in side.tensors if name in ("lm_head.weight", "head.weight"))


def _router(side: PlantedSide) -> str:
    return _some(name for name in side.tensors if ".router.weight" in name or ".gate.weight" in name)


def _matrix(side: PlantedSide, part: str = "") -> str:
    """Return a matrix in the middle of the model."""
    likely = ("mlp.up_proj", "mlp.0.", "self_attn.o_proj", "attn.out")
    matrices = [n for n, tensor in side.tensors.items() if tensor.dim() == 2 and part in n and "weight" in n]
    return _some(name for word in likely for name in matrices if word in name)


# --- what drift says --------------------------------------------------------------------------------------


def named_first(found: SideComparison) -> str:
    """Return the name of the first fault or cell; empty if nothing differs."""
    return next(iter([fault.name for fault in found.faults] + [each.cell.key for each in found.cells]), "")


@dataclass(frozen=True)
class PlantFound:
    """The finding of one plant in one architecture."""

    wanted: tuple[str, ...]
    explained: bool
    found: SideComparison

    @property
    def is_first(self) -> bool:
        return named_first(self.found) in self.wanted


def token_ids() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)


def planted(plant: str, architecture: str, folder: Path) -> PlantFound | None:
    """Run `drift` on a plant; return None for an architecture that has no place for it."""
    side = PlantedSide(lively(architecture))
    torch.manual_seed(1)
    try:
        PLANTS[plant](side)
    except LookupError:
        return None
    save_file(
        {name: tensor.contiguous() for name, tensor in side.tensors.items()}, folder / "model.safetensors"
    )
    ids = token_ids()
    said = None
    if side.explained:
        values = torch.tensor(side.logprobs(folder, ids))
        said = recorded(values.tolist(), ids.tolist()) if bool(values.isfinite().all()) else None
    table = sampler(side.table) if side.table else None
    other = SamplerSide(sent=folder, sampler=table, recorded=said)
    found = compare_sides(trainer(side.config, side.model), other, ids.tolist())
    return PlantFound(side.first, said is not None, found)
