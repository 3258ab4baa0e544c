"""Deterministic operations on CUDA: our table beside torch's own page, torch's errors, and other packages."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from zerodrift.engine.habits.determinism import (
    nondeterministic_operation,
    require_deterministic_kernels,
)
from zerodrift.errors import UnsupportedError
from zerodrift.inspect.trace.operations import every_operation, name_of
from zerodrift.policy.order import REFUSED_ON_CUDA, DeterminismNeed, need_of

TREE = DeterminismNeed("precision.reduce.order", "tree", "rank")


def plane(dims: int) -> Tensor:
    return torch.randn(1, 2, *[4] * dims, requires_grad=True)


def classes() -> tuple[Tensor, Tensor]:
    return fn.log_softmax(plane(2), 1), torch.zeros(1, 4, 4, dtype=torch.long)


def spoken() -> Tensor:
    scores = fn.log_softmax(torch.randn(8, 2, 5, requires_grad=True), -1)
    return fn.ctc_loss(scores, torch.ones(2, 3, dtype=torch.long), torch.tensor([8, 8]), torch.tensor([3, 3]))


def enlarged(dims: int, mode: str, antialias: bool = False) -> Tensor:
    return fn.interpolate(plane(dims), scale_factor=2, mode=mode, antialias=antialias)


def bag() -> Tensor:
    weight = torch.randn(4, 3, requires_grad=True)
    return fn.embedding_bag(torch.zeros(2, 3, dtype=torch.long), weight, mode="max")


RUNS: dict[str, Callable[[], Tensor]] = {
    "AvgPool3d": lambda: fn.avg_pool3d(plane(3), 2),
    "AdaptiveAvgPool2d": lambda: fn.adaptive_avg_pool2d(plane(2), 3),
    "AdaptiveAvgPool3d": lambda: fn.adaptive_avg_pool3d(plane(3), 3),
    "AdaptiveMaxPool2d": lambda: fn.adaptive_max_pool2d(plane(2), 3),
    "AdaptiveMaxPool3d": lambda: fn.adaptive_max_pool3d(plane(3), 3),
    "FractionalMaxPool2d": lambda: fn.fractional_max_pool2d(plane(2), 2, output_size=2),
    "FractionalMaxPool3d": lambda: fn.fractional_max_pool3d(plane(3), 2, output_size=2),
    "MaxUnpool1d": lambda: fn.max_unpool1d(*fn.max_pool1d(plane(1), 2, return_indices=True), 2),
    "MaxUnpool2d": lambda: fn.max_unpool2d(*fn.max_pool2d(plane(2), 2, return_indices=True), 2),
    "MaxUnpool3d": lambda: fn.max_unpool3d(*fn.max_pool3d(plane(3), 2, return_indices=True), 2),
    "linear": lambda: enlarged(1, "linear"),
    "bicubic": lambda: enlarged(2, "bicubic"),
    "bilinear, antialias": lambda: enlarged(2, "bilinear", antialias=True),
    "bicubic, antialias": lambda: enlarged(2, "bicubic", antialias=True),
    "ReflectionPad1d": lambda: fn.pad(plane(1), (1, 1), mode="reflect"),
    "ReflectionPad3d": lambda: fn.pad(plane(3), (1,) * 6, mode="reflect"),
    "NLLLoss": lambda: fn.nll_loss(*classes()),
    "CTCLoss": spoken,
    "EmbeddingBag": bag,
    "put_": lambda: plane(1).put(torch.tensor([0]), torch.tensor([1.0])),
    "histc": lambda: torch.histc(torch.rand(5)),
    "bincount": lambda: torch.bincount(torch.tensor([0, 1]), weights=torch.rand(2)),
    "median": lambda: torch.median(plane(1), 2)[0],
    "nanmedian": lambda: torch.nanmedian(plane(1), 2)[0],
    "grid_sample": lambda: fn.grid_sample(plane(2), torch.rand(1, 3, 3, 2), align_corners=False),
    "grid_sample, 3d": lambda: fn.grid_sample(plane(3), torch.rand(1, 3, 3, 3, 3), align_corners=False),
    "scatter_reduce": lambda: torch.rand(4).scatter_reduce(0, torch.tensor([0, 0]), torch.rand(2), "prod"),
    "index_reduce": lambda: torch.rand(4).index_reduce(0, torch.tensor([0, 0]), torch.rand(2), "prod"),
}
"""Name on torch's page -> a use."""

TAKEN = {"trilinear", "bilinear", "ReflectionPad2d", "cumsum", "resize_"}
"""Names of that page that no longer raise, or belong to quantized tensors; see [Note: refused on CUDA]."""


def names_in(use: Callable[[], Tensor]) -> list[str]:
    names: list[str] = []
    with every_operation(lambda func, *_: names.append(name_of(func))):
        out = use()
        if out.requires_grad:
            out.sum().backward()
    return names


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_row_is_met_by_a_use_of_what_it_stands_for() -> None:
    met = set()
    for use in RUNS.values():
        names = [name.lstrip("_") for name in names_in(use)]
        mine = {start for start in REFUSED_ON_CUDA for name in names if name.startswith(start)}
        assert mine
        met |= mine
    assert met == set(REFUSED_ON_CUDA)


def test_every_operation_that_torchs_page_refuses_is_in_the_table() -> None:
    """A newer torch, whose page names more, fails with the missing row; mps is refused anyway."""
    page = (torch.use_deterministic_algorithms.__doc__ or "").partition("operations will throw a")[2]
    entries = re.split(r"\n *\* ", page.partition("In addition")[0])  # Python 3.13 has less indent
    on_cuda = "\n".join(entry for entry in entries if "CUDA" in entry or "MPS" not in entry)
    names = re.findall(r":(?:class|func):`torch\.(?:\w+\.)*(\w+)`|- ``(\w+)``", on_cuda)
    named = {one or other for one, other in names} - {"RuntimeError", "interpolate"}
    assert len(named) > 20
    assert named <= {use.partition(",")[0] for use in RUNS} | TAKEN


@pytest.mark.parametrize(
    ("said", "do"),
    [
        ("grid_sampler_2d_backward_cuda", "`gather`"),
        ("_histc_cuda with floating point input", "`bincount`"),
        ("median CUDA with indices output", "`kthvalue`"),
        ("max_unpooling2d_forward_out", "`scatter`"),
        ("something_new_cuda", "Use another operation in the model"),
    ],
)
def test_torchs_error_becomes_ours_with_what_to_use(said: str, do: str) -> None:
    error = RuntimeError(f"{said} does not have a deterministic implementation, but you set 'torch...'")
    found = nondeterministic_operation(error, TREE)
    assert f"must be `rank` with `{said}`" in str(found) and do in str(found)
    assert nondeterministic_operation(RuntimeError("out of memory"), TREE) is None
    digests = need_of(False, 5)
    assert digests is not None
    assert "`run.digest_every`: must be `0`" in str(nondeterministic_operation(error, digests))


# --- kernels of other packages ----------------------------------------------------------------------------

Fused = type("Fused", (nn.Linear,), {"__module__": "transformer_engine.pytorch.linear"})
FLASH, ENGINE = "FLASH_ATTENTION_DETERMINISTIC", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def model(attention: str = "sdpa", layer: type[nn.Module] = nn.Linear) -> nn.Module:
    made = nn.Sequential(layer(2, 2))
    made.config = SimpleNamespace(_attn_implementation=attention)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("made", "before", "after"),
    [
        (model(), {}, {}),
        (model("flash_attention_2"), {}, {FLASH: "1"}),
        (model("kernels-community/flash-attn3"), {FLASH: "0"}, f"`{FLASH}`: must be '1' with attention"),
        (model(layer=Fused), {ENGINE: "0"}, {ENGINE: "0"}),
        (model(layer=Fused), {}, f"`{ENGINE}`: must be '0' with `0`, a module of transformer_engine"),
    ],
)
def test_switches_of_other_packages_are_set_or_asked_for(
    made: nn.Module, before: dict[str, str], after: dict[str, str] | str
) -> None:
    held = dict(before)
    require_deterministic_kernels(made, "cpu", TREE, held)
    assert held == before
    if isinstance(after, str):
        with pytest.raises(UnsupportedError, match=after):
            require_deterministic_kernels(made, "cuda", TREE, held)
    else:
        require_deterministic_kernels(made, "cuda", TREE, held)
        assert held == after
