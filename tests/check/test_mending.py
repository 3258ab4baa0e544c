"""The config that mends findings: what stands in it, that it loads, and that one cause is one group."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerodrift.config import load
from zerodrift.inspect.check.findings import run_findings
from zerodrift.inspect.check.mending import mending
from zerodrift.inspect.check.report import run_page, run_text
from zerodrift.inspect.check.table import Kind, RunFinding
from zerodrift.inspect.trace.records import ModelRecord, ParameterRecord, ProcessRecord
from zerodrift.policy import mesh_for, resolve

LIBRARIES: dict[str, dict[str, Any]] = {
    "torch": {},
    "fully_shard": {"layout": "sharded on dim 0 over 2 ranks"},
    "FullyShardedDataParallel": {"wrappers": ("FullyShardedDataParallel",)},
    "DeepSpeed": {"wrappers": ("DeepSpeedEngine",)},
    "transformers": {"libraries": {"accelerate": "1", "transformers.trainer": "5"}},
    "accelerate": {"libraries": {"accelerate": "1"}},
    "Lightning": {"libraries": {"lightning": "2"}},
}

NAMES = {"router-in-16-bits": ("layers.3.router.weight", "layers.4.router.weight")}

SAID: dict[Kind, dict[str, str]] = {
    "no-master": {
        "*": "model.float()",
        "DeepSpeed": '"bf16_master_weights_and_grads": false',
        "transformers": "TrainingArguments(bf16=True)",
        "accelerate": 'Accelerator(mixed_precision="bf16")',
        "Lightning": 'Trainer(precision="bf16-mixed")',
    },
    "wire-in-16-bits": {
        "fully_shard": "reduce_dtype=torch.float32",
        "FullyShardedDataParallel": "reduce_dtype=torch.float32",
        "DeepSpeed": '"communication_data_type": "fp32"',
    },
    "rounded-before-accumulation": {
        "fully_shard": "reduce_dtype=torch.float32",
        "FullyShardedDataParallel": "# no `with model.no_sync():`",
        "DeepSpeed": '"grad_accum_dtype": "fp32"',
    },
    "loss-in-16-bits": {"*": "logits.float()"},
    "average-in-16-bits": {"*": "copy.deepcopy(model).float()"},
    "router-in-16-bits": {"*": "router.weight.float()"},
}


def process(layout: str = "", wrappers: tuple[str, ...] = (), **rest: Any) -> ProcessRecord:
    one = ParameterRecord("layers.3.router.weight", (4,), "torch.nn.Linear", True, layout)
    for column, dtype in {"storage": "bfloat16", "compute": "bfloat16", "master": "same"}.items():
        one.add(column, dtype, "")  # type: ignore[arg-type]
    one.facts |= {"optimized": True, "gradients": 3, "changed": True, "lost": 0.75}
    return ProcessRecord(0, 2, 3, [ModelRecord("M", [one], wrappers=wrappers)], **rest)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_says_what_mends_a_finding_and_loads(library: str) -> None:
    run = process(**LIBRARIES[library])
    for kind, said in SAID.items():
        found = RunFinding(kind, None, NAMES.get(kind, ()), "what.", "do.")
        blocks = dict(mending([run], [found]))
        expected = said.get(library, said.get("*", ""))
        assert expected in blocks.get(library, ""), (kind, blocks)
        assert all(len(line) <= 78 for text in blocks.values() for line in text.splitlines())
        if "zerodrift" in blocks:
            config = load(json.loads(blocks["zerodrift"]))
            assert resolve(config, mesh_for(config, 2)).mode.name == "BF16"
        assert ('"match": "layers.*.router.weight"' in str(blocks)) is (kind in NAMES)
    assert mending([run], []) == []


@pytest.mark.parametrize(
    ("library", "unit"),
    [
        ("fully_shard", "fully_shard(router, mp_policy=wide)"),
        ("FullyShardedDataParallel", "units = CustomPolicy(is_unit)"),
    ],
)
def test_a_router_that_is_gathered_in_16_bits_gets_a_unit_of_its_own(library: str, unit: str) -> None:
    run = process(**LIBRARIES[library])
    found = [RunFinding("router-in-16-bits", None, NAMES["router-in-16-bits"], "what.", "do.")]
    assert unit not in mending([run], found)[0][1]
    run.models[0].parameters[0].add("gather", "bfloat16", "")
    after = mending([run], found)[0][1]
    assert unit in after.splitlines() and "router.weight.float()" not in after
    assert run_findings([run])[-1].do.startswith("Give the router a unit of its own in fp32")


def test_findings_with_one_mending_stand_together_and_the_costliest_first() -> None:
    run = process()
    run.events = [{"kind": "loss-loss", "line": "a.py:1", "operation": "log_softmax", "dtype": "bfloat16",
                   "module": "", "greatest": 8.0}]  # fmt: skip
    found = run_findings([run])
    assert [finding.kind for finding in found] == ["no-master", "loss-in-16-bits", "router-in-16-bits"]
    costs = [finding.cost for finding in found]
    assert costs == sorted(costs, reverse=True) and costs == [0.75, 8 / 256, 1 / 256]
    text = run_text([run], found, (), color=False)
    assert (
        text.index("1  Keep the weights in fp32") < text.index("no-master") < text.index("2  Cast the logits")
    )
    assert max(map(len, text.splitlines())) <= 80
    narrow = run_text([run], found, (), color=False, width=60)
    table, _, config = narrow.partition("\nconfig")
    assert max(map(len, table.splitlines())) <= 60 and "storage bf16  gather " in table
    assert "logits.float(), targets)  # loss-in-16-bits" in config
    assert "logits.float()" in run_page([run], found, (), "python a.py")
