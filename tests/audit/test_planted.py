"""Faults of precision are named first, and the same without a fault gets no finding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from tests.audit.planted import HEALTHY, MODES, PLANTED, Batches, Planted
from zerodrift.api import make_plan
from zerodrift.inspect.audit.entry import audit
from zerodrift.inspect.audit.report import Audit

ALWAYS = frozenset((
    "router-by-rule", "one-of-a-module", "norm-by-rule", "embedding-in-code", "accumulate-of-one",
    "clip-of-scaled-gradients", "softmax-overflows", "table-in-bf16", "stale-copy",
))  # fmt: skip
"""Faults whose tests are not marked slow: one of each kind of finding."""

ALWAYS_HEALTHY = frozenset((("decoder", "fp16"), ("pictures", "autocast-bf16")))

pytestmark = pytest.mark.long


def audited(model: nn.Module, config: dict[str, Any], batches: Batches) -> Audit:
    """Audit without a search for pins."""
    return audit(make_plan(config, model), model, batches, budget=None)


def skip_without(on: str) -> None:
    if on not in ("decoder", "deep decoder", "pictures"):
        pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")


def cells() -> Iterator[Any]:
    for planted in PLANTED:
        marks = () if planted.name in ALWAYS else pytest.mark.slow
        yield pytest.param(planted, id=planted.name, marks=marks)


def twins() -> Iterator[Any]:
    """Yield every architecture in every mode, and the other healthy twins of faults."""
    seen: list[tuple[str, dict[str, Any]]] = []
    named = [(f"{on}-{mode}", on, each.config(mode)) for on, each in HEALTHY.items() for mode in MODES]
    named += [(planted.name, *planted.healthy()) for planted in PLANTED]
    for name, on, config in named:
        if (on, config) not in seen:
            seen.append((on, config))
            always = (on, config["precision"]["mode"]) in ALWAYS_HEALTHY and name.startswith(on)
            yield pytest.param(on, config, id=name, marks=() if always else pytest.mark.slow)


@pytest.mark.parametrize("planted", list(cells()))
@pytest.mark.filterwarnings("ignore:.*is pinned to torch.float32, and the model itself casts it")
def test_a_fault_is_first(planted: Planted) -> None:
    skip_without(planted.on)
    found = audited(planted.model(), planted.config(), planted.data())
    assert planted.first(found.findings), [(each.kind, each.where) for each in found.findings]
    if planted.kinds == ("rounded",) and planted.mode == "fp32":  # all else is as in the reference
        assert f": {found.drift.rms:.2g} of a log-probability" in found.findings[0].what


@pytest.mark.parametrize(("on", "config"), list(twins()))
def test_nothing_is_found_where_nothing_is_wrong(on: str, config: dict[str, Any]) -> None:
    skip_without(on)
    healthy = HEALTHY[on]
    assert not audited(healthy.model(), config, healthy.batches()).findings
