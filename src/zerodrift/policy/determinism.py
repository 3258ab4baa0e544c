"""Keys that ask for deterministic operations, and the operations of torch that are none on CUDA.

torch's deterministic operations are on while a key of `need_of` asks for them. Many operations then have
another algorithm, and torch refuses those of `REFUSED_ON_CUDA`.

Invariant: pure, and without torch.

[Note: refused on CUDA] The rows are the operations for which the CUDA library of torch 2.13 raises, and one
that adds in no fixed order without raising. Its documentation also names operations that no longer raise:
cumsum, histc of whole numbers, MaxPool3d, bilinear and trilinear interpolation, ReflectionPad2d and
ReplicationPad have another algorithm in this mode. So have index_add, scatter_add, index_put, the
backwards of gather and index_select, and the flash and memory-efficient backwards of
scaled_dot_product_attention, which takes no cuDNN kernel in this mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeterminismNeed:
    """The key that asks for deterministic operations, as errors name it."""

    key: str
    value: str
    instead: str
    """The value that asks for nothing."""


def need_of(is_tree: bool, digest_every: int = 0) -> DeterminismNeed | None:
    """Return what asks for deterministic operations: the order of sums, or digests of a run."""
    if is_tree:
        return DeterminismNeed("precision.reduce.order", "tree", "rank")
    return DeterminismNeed("run.digest_every", str(digest_every), "0") if digest_every else None


_POOL = "Use `unflatten` and `mean`, where windows do not overlap, or a convolution with strides"
_UPSAMPLE = "Use mode `nearest`, `bilinear` or `trilinear`, without `antialias`"
_PAD = "Use mode `replicate`"

REFUSED_ON_CUDA: Mapping[str, str] = {
    "avg_pool3d_backward": _POOL,
    "adaptive_avg_pool2d_backward": _POOL,
    "adaptive_avg_pool3d_backward": _POOL,
    "adaptive_max_pool2d_backward": "Use `max_pool2d` with a kernel size",
    "adaptive_max_pool3d_backward": "Use `max_pool3d` with a kernel size",
    "fractional_max_pool2d_backward": "Use `max_pool2d`",
    "fractional_max_pool3d_backward": "Use `max_pool3d`",
    "max_unpool": "Use `scatter`",
    "upsample_linear1d_backward": _UPSAMPLE,
    "upsample_bicubic2d_backward": _UPSAMPLE,
    "upsample_bilinear2d_aa_backward": _UPSAMPLE,
    "upsample_bicubic2d_aa_backward": _UPSAMPLE,
    "reflection_pad1d_backward": _PAD,
    "reflection_pad3d_backward": _PAD,
    "grid_sampler_2d_backward": "Use `gather` for the neighbours of each place",
    "grid_sampler_3d_backward": "Use `gather` for the neighbours of each place",
    "nll_loss2d_forward": "Give the loss flat predictions, of shape [places, classes]",
    "ctc_loss_backward": "Give the loss targets that cuDNN takes: flat int32 on the CPU, with blank 0",
    "embedding_bag_backward": "Use mode `sum` or `mean`; only `max` is refused",
    "put": "Use `index_put`",
    "histc": "Give it whole numbers, or use `bincount`",
    "bincount": "Use `index_add` for the weights",
    "median": "Use `kthvalue`",
    "nanmedian": "Use `kthvalue`",
    "scatter_reduce": "Use `reduce='sum'`, `'mean'`, `'amax'` or `'amin'`; only a product is refused",
    "index_reduce": "Use `scatter_reduce`",
}
"""Start of an operation's name, in a trace or in torch's error -> what to use.

See [Note: refused on CUDA]."""

SILENT = frozenset(["adaptive_max_pool3d_backward"])
"""Operations of `REFUSED_ON_CUDA` that torch runs nevertheless."""


def remedy(name: str) -> str | None:
    """Return what to use for an operation of aten, or of torch's error; None for one that may stay."""
    name = name.lstrip("_")
    return next((do for start, do in REFUSED_ON_CUDA.items() if name.startswith(start)), None)
