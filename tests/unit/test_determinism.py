"""Deterministic operations on CUDA: torch's errors, and switches of other packages."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zerodrift.engine.habits.determinism import (
    COMPILED,
    COMPILER,
    Determinism,
    nondeterministic_operation,
    require_deterministic_kernels,
)
from zerodrift.errors import UnsupportedError
from zerodrift.policy.order import DeterminismNeed, need_of

TREE = DeterminismNeed("precision.reduce.order", "tree", "rank")


@pytest.mark.parametrize(
    ("said", "do"),
    [
        ("grid_sampler_2d_backward_cuda", "`gather`"),
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


@pytest.mark.parametrize("imported", [False, True])
def test_the_compiler_is_switched_and_not_imported(monkeypatch: pytest.MonkeyPatch, imported: bool) -> None:
    compiler = SimpleNamespace(deterministic=False)
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, COMPILER, compiler)
    model = nn.Linear(1, 1)
    determinism = Determinism(torch.device("cpu"))
    determinism.ask(TREE, model)
    assert torch.are_deterministic_algorithms_enabled() and os.environ[COMPILED] == "1"
    assert compiler.deterministic is imported and (COMPILER in sys.modules) is imported
    determinism.release()
    assert not torch.are_deterministic_algorithms_enabled() and COMPILED not in os.environ
    assert not compiler.deterministic
