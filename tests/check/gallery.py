"""The gallery as data: how each script is run, and what `zerodrift check` must say of it.

A finding is a kind, a parameter and a column. Every one that is listed must be named; `more` are true of
the run as well and may be; any other is a false alarm. A healthy run has none at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ANY = "*"
"""Matches one parameter or more. An empty name is a finding of the run or of a whole column."""

ENVIRONMENT: Mapping[str, str] = {
    "PYTHONPATH": str(HERE),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of the scripts: the path of `tiny`, and a machine without GPUs."""

Finding = tuple[str, str, str]
"""Kind, parameter, column."""


@dataclass(frozen=True)
class Script:
    """One run on two CPU ranks with its expected findings."""

    name: str
    launcher: str
    """`torchrun`, `deepspeed` or `accelerate`."""
    path: str
    arguments: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    more: tuple[str, ...] = ()
    """Kinds of findings that are admitted as well."""
    expect: str = ""
    """The config for `--expect`."""
    needs: tuple[str, ...] = ()
    """Required packages."""
    fixed: tuple[str, str] = ("", "")
    """The package that has fixed the bug, and its first fixed version."""
    fix: tuple[tuple[str, str], ...] = ()
    """Lines of the script and their replacements, as `zerodrift check` prints them."""
    says: tuple[str, ...] = ()
    """Parts of the printed advice."""
    remains: str = ""
    """The kind of a finding that the fixed script still has."""
    keys: Mapping[str, Any] | None = None
    """Keys of DeepSpeed in the printed advice, which fix the config."""

    def command(self, port: int) -> list[str]:
        """Return the command of a user; a free port keeps runs apart."""
        launch = {
            "torchrun": [_beside("torchrun"), "--nproc-per-node=2", f"--master-port={port}"],
            "deepspeed": [_beside("deepspeed"), "--num_gpus=2", f"--master_port={port}"],
            "accelerate": [
                *(_beside("accelerate"), "launch", "--cpu", "--num_processes=2", "--num_machines=1"),
                *("--mixed_precision=bf16", f"--main_process_port={port}"),
            ],
        }[self.launcher]
        return [*launch, str(HERE / self.path), *self.arguments]


def _beside(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def _bug(name: str, *findings: str, more: str = "", path: str = "", needs: str = "", **rest: Any) -> Script:
    """Return a script, with the bug's name unless `path` is given. Findings are `kind parameter column`."""
    split = (finding.split() for finding in findings)
    return Script(
        name,
        rest.pop("launcher", "torchrun"),
        path or f"bugs/{name.replace('-', '_')}.py",
        findings=tuple((kind, parameter.strip("-"), column.strip("-")) for kind, parameter, column in split),
        more=tuple(more.split()),
        needs=tuple(needs.split()),
        **rest,
    )


def _deepspeed(config: str, *findings: str, **rest: Any) -> Script:
    arguments = ("--deepspeed", "--deepspeed_config", str(HERE / f"configs/{config}.json"))
    if rest.pop("expected", False):
        rest["expect"] = f"configs/{config}.json"
    path, needs = "bugs/deepspeed_config.py", "deepspeed"
    rest.setdefault("more", WIRE)
    return _bug(config, *findings, path=path, needs=needs, launcher="deepspeed", arguments=arguments, **rest)


UNIT = "fully_shard(model.router, mp_policy=MixedPrecisionPolicy(torch.float32))\n"
WHOLE = "\nfully_shard(model, mp_policy=policy)"
WIDE = "fully_shard(router, mp_policy=wide)"

AUTOCAST = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
STAGE_3 = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 3}}

WIRE = "wire-in-16-bits"
EXPERT = "experts.0.weight"
TRAINER = ("transformers", "accelerate")
SUMS = "rounded-before-accumulation * accumulate"
NO_SYNC = f"rounded-before-accumulation router-in-16-bits {WIRE}"

BUGS: tuple[Script, ...] = (
    _bug("accelerate-3979",
        "no-master * master",
        more=f"state-too-narrow router-in-16-bits norm-in-16-bits {WIRE}",
        says=("model = model.float()", "reduce_dtype=torch.float32", WIDE),
        fix=(("policy = ", "model = model.float()\npolicy = "), (WHOLE, f"\n{UNIT}{WHOLE[1:]}"))),
    _bug("deepspeed-7747",
        "router-in-16-bits router.weight compute",
        more=WIRE,
        launcher="deepspeed",
        needs="deepspeed",
        says=("model = model.float()", "with torch.autocast(x.device.type, enabled=False):"),
        keys={"bf16": {"enabled": False}, "torch_autocast": AUTOCAST},
        fix=(("model = Pinned()", "model = Pinned().float()"),
            ('"bf16": {"enabled": True}', f'"torch_autocast": {AUTOCAST}'),
            ("        return nn.functional.linear(h.to(weight.dtype), weight).softmax(-1)",
            """        with torch.autocast(h.device.type, enabled=False):
            return nn.functional.linear(h.float(), weight.float()).softmax(-1)"""))),
    _bug("deepspeed-7718",
        "not-accumulated * accumulate",
        more=WIRE,
        needs="deepspeed",
        says=("call `engine.step()` after each",),
        fix=((" / MICRO_BATCHES", ""),
            ("    engine.step()", "        engine.step()"),
            ('"train_micro_', '"gradient_accumulation_steps": MICRO_BATCHES,\n    "train_micro_'))),
    _deepspeed("gradient_accumulation_dtype", SUMS, "key-without-effect * accumulate",
        expected=True,
        keys=STAGE_3),
    _deepspeed("communication_data_type_autocast",
        *("key-without-effect up.weight reduce", "key-without-effect head.weight reduce"),
        expected=True,
        keys={"torch_autocast": AUTOCAST}),
    _deepspeed("stage_1_average", "not-averaged * reduce", fixed=("deepspeed", "0.19.8"), keys=STAGE_3),
    _deepspeed("bf16_master_weights",
        *("no-master up.weight master", "norm-in-16-bits norm.weight master", "state-too-narrow * state"),
        keys={
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False},
            "communication_data_type": "fp32"}),
    _deepspeed("fp16_autocast_clip",
        "norm-of-scaled-gradients - grad",
        says=("Use bfloat16 in `torch_autocast`",),
        keys={"torch_autocast": AUTOCAST}),
    _bug("fsdp1-no-sync",
        f"rounded-before-accumulation {EXPERT} accumulate",
        more=NO_SYNC,
        says=("# no `with model.no_sync():`", "units = CustomPolicy(is_unit)")),
    _bug("fsdp2-no-sync",
        SUMS,
        more=f"router-in-16-bits {WIRE}",
        fixed=("torch", "2.15"),
        says=("reduce_dtype=torch.float32", WIDE),
        fix=(("param_dtype=torch.bfloat16)", "param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"),
            (WHOLE, f"\n{UNIT}{WHOLE[1:]}"))),
    _bug("lightning-bf16-true",
        *("no-master model.up.weight master", "state-too-narrow * state"),
        more=f"norm-in-16-bits rounded-before-accumulation {WIRE}",
        path="healthy/lightning_run.py",
        arguments=("bf16-true",),
        needs="lightning",
        says=("model = model.float()", 'Trainer(precision="bf16-mixed")'),
        fix=(("precision=sys.argv[1]", 'precision="bf16-mixed"'),)),
    _bug("hf-trainer-bf16",
        *("no-master model.embed_tokens.weight master", "state-too-narrow * state"),
        more=f"no-master norm-in-16-bits {WIRE}",
        needs=" ".join(TRAINER),
        says=("model = model.float()", "TrainingArguments(bf16=True)"),
        fix=(("from_pretrained(folder)\n", "from_pretrained(folder).float()\n"),),
        remains="narrow-export"),  # the file that it trains from
)  # fmt: skip


def _plain(kind: str) -> Script:
    return Script(kind, "torchrun", "healthy/plain.py", (kind,))


def _zero(stage: int) -> Script:
    return _deepspeed(f"healthy_zero_{stage}", expected=True)


HEALTHY: tuple[Script, ...] = (
    *map(_plain, ("ddp", "ddp_autocast", "ddp_no_sync", "fsdp2", "fsdp1", "averaged_updates")),
    *map(_zero, (1, 2, 3)),
    Script("accelerate", "accelerate", "healthy/accelerate_bf16.py", needs=("accelerate",)),
    Script("hf-trainer", "torchrun", "healthy/hf_trainer.py", needs=TRAINER),
    Script("hf-trainer-autocast", "torchrun", "healthy/hf_trainer.py", ("bf16",), needs=TRAINER),
    Script("hf-trainer-tied", "torchrun", "healthy/hf_trainer.py", ("tied",), needs=TRAINER),
    *(
        Script(name, "torchrun", "healthy/lightning_run.py", (precision,), needs=("lightning",))
        for name, precision in (("lightning", "32-true"), ("lightning-autocast", "bf16-mixed"))
    ),
    Script("zerodrift", "torchrun", "healthy/with_zerodrift.py"),
)
