"""The gallery as data: how each script is run, and what `zerodrift check` must say of it.

A finding is a kind, a parameter and a column. Every one that is listed must be named; `more` are true of
the run as well and may be; any other is a false alarm. A healthy run has none at all.

Kinds:

    rounded-before-accumulation  micro-batches are added in 16 bits
    no-master                    a 16-bit weight is updated in place
    state-too-narrow             a second moment in 16 bits, which can never shrink
    router-in-16-bits            a router computes in 16 bits, where it was made in more
    norm-in-16-bits              a norm's gains are updated in 16 bits: 1.0 stays 1.0
    buffer-rounded               a buffer is kept in 16 bits
    ranks-differ                 two ranks hold other values
    key-without-effect           what the config asks for is not what is observed; needs `--expect CONFIG`
    never-updated                steps were taken and the value is the same, bit for bit
    upcast-without-effect        a 16-bit weight that is updated in place computes in more
    not-averaged                 the optimizer's gradient is not the mean of the ranks' gradients
    not-accumulated              nor the sum of the micro-batches'
    norm-of-scaled-gradients     gradients were clipped while they were multiplied by the loss scale
    untied                       declared one, and two
    narrow-export                a file holds less than what was trained
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ANY = "*"
"""A parameter of a finding: any; one at least. Empty: the finding is of the run, or its column of none."""

ENVIRONMENT: Mapping[str, str] = {
    "PYTHONPATH": str(HERE),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""What the scripts need beyond what they say: `tiny`, and a machine without GPUs."""

Finding = tuple[str, str, str]
"""Kind, parameter, column."""


@dataclass(frozen=True)
class Script:
    """One run on two CPU ranks, and what is true of it."""

    name: str
    launcher: str
    """`torchrun`, `deepspeed`, `accelerate` or `python`."""
    path: str
    arguments: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    more: tuple[str, ...] = ()
    """Kinds that may be named besides."""
    expect: str = ""
    """The config that is handed to `--expect`."""
    needs: tuple[str, ...] = ()
    """Packages."""
    report: str = ""
    """The public report."""
    mended: tuple[str, str] = ("", "")
    """The package that has mended it, and the first version."""

    def command(self, port: int) -> list[str]:
        """What a user would type; a free port keeps runs apart."""
        launch = {
            "python": [sys.executable],
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


@dataclass(frozen=True)
class Bad:
    """One run that cannot be observed to the end."""

    name: str
    script: Script
    code: int
    """Of `zerodrift check`: 0 where a table comes all the same, 2 where none can."""
    says: tuple[str, ...] = ()
    """Words that must be in what is printed, in any case."""


def _deepspeed(config: str, **rest: object) -> Script:
    path = f"configs/{config}.json"
    arguments = ("--deepspeed", "--deepspeed_config", str(HERE / path))
    given = {"name": config, **rest}
    return Script(
        launcher="deepspeed",
        path="bugs/deepspeed_config.py",
        arguments=arguments,
        needs=("deepspeed",),
        **given,
    )  # type: ignore[arg-type]


EXPERT = "experts.0.weight"
TRAINER = ("transformers", "accelerate")

BUGS: tuple[Script, ...] = (
    Script(
        "accelerate-3979",
        *("torchrun", "bugs/accelerate_3979.py"),
        findings=(("no-master", ANY, "master"),),
        more=("state-too-narrow", "router-in-16-bits", "norm-in-16-bits"),
        report="huggingface/accelerate#3979",
    ),
    Script(
        "deepspeed-7747",
        *("deepspeed", "bugs/deepspeed_7747.py"),
        findings=(("router-in-16-bits", "router.weight", "compute"),),
        needs=("deepspeed",),
        report="deepspeedai/DeepSpeed#7747",
    ),
    Script(
        "deepspeed-5812",
        *("torchrun", "bugs/deepspeed_5812.py"),
        findings=(("buffer-rounded", "frequencies", ""),),
        needs=("deepspeed",),
        report="deepspeedai/DeepSpeed#5812",
    ),
    Script(
        "deepspeed-7718",
        *("torchrun", "bugs/deepspeed_7718.py"),
        findings=(("not-accumulated", ANY, "accumulate"),),
        needs=("deepspeed",),
        report="deepspeedai/DeepSpeed#7718",
    ),
    _deepspeed(
        "grad_accum_dtype_stage_2",
        findings=(
            ("rounded-before-accumulation", ANY, "accumulate"),
            ("key-without-effect", ANY, "accumulate"),
        ),
        expect="configs/grad_accum_dtype_stage_2.json",
        report="deepspeedai/DeepSpeed#2768",
        mended=("deepspeed", "0.19.8"),
    ),
    _deepspeed(
        "gradient_accumulation_dtype",
        findings=(
            ("rounded-before-accumulation", ANY, "accumulate"),
            ("key-without-effect", ANY, "accumulate"),
        ),
        expect="configs/gradient_accumulation_dtype.json",
        report="deepspeedai/DeepSpeed#1835",
    ),
    _deepspeed(
        "communication_data_type_autocast",
        findings=(
            ("key-without-effect", "up.weight", "reduce"),
            ("key-without-effect", "head.weight", "reduce"),
        ),
        expect="configs/communication_data_type_autocast.json",
        report="deepspeedai/DeepSpeed#6993",
    ),
    _deepspeed(
        "stage_1_average",
        findings=(("not-averaged", ANY, "reduce"),),
        report="deepspeedai/DeepSpeed#4083",
        mended=("deepspeed", "0.19.8"),
    ),
    _deepspeed(
        "stage_1_average_autocast",
        findings=(("not-averaged", ANY, "reduce"), ("rounded-before-accumulation", ANY, "accumulate")),
        report="deepspeedai/DeepSpeed#4083",
        mended=("deepspeed", "0.19.8"),
    ),
    Script(
        "bf16-adamw",
        *("torchrun", "bugs/bf16_adamw.py"),
        findings=(("no-master", ANY, "master"), ("state-too-narrow", ANY, "state")),
        more=("norm-in-16-bits", "router-in-16-bits"),
        report="axolotl-ai-cloud/axolotl#3154",
    ),
    Script(
        "norm-gains",
        *("torchrun", "bugs/norm_gains.py"),
        findings=(("norm-in-16-bits", "norm.weight", "master"), ("no-master", "up.weight", "master")),
        more=("state-too-narrow", "never-updated"),
        report="vllm-project/speculators#711",
    ),
    Script(
        "prime-rl-3557",
        *("torchrun", "bugs/prime_rl_3557.py"),
        findings=(
            ("no-master", "layers.0.A_log", "master"),
            ("never-updated", "layers.1.D", "storage"),
            ("upcast-without-effect", "layers.0.A_log", "compute"),
        ),
        more=("state-too-narrow",),
        report="PrimeIntellect-ai/prime-rl#3557",
    ),
    Script(
        "fsdp1-no-sync",
        *("torchrun", "bugs/fsdp1_no_sync.py"),
        findings=(("rounded-before-accumulation", EXPERT, "accumulate"),),
        more=("rounded-before-accumulation", "router-in-16-bits"),
    ),
    Script(
        "fsdp1-no-sync-flat",
        *("torchrun", "bugs/fsdp1_no_sync.py"),
        arguments=("--flat", "--reduce", "bf16"),
        findings=(("rounded-before-accumulation", EXPERT, "accumulate"),),
        more=("rounded-before-accumulation", "router-in-16-bits"),
    ),
    Script(
        "fsdp2-no-sync",
        *("torchrun", "bugs/fsdp2_no_sync.py"),
        findings=(("rounded-before-accumulation", ANY, "accumulate"),),
        more=("router-in-16-bits",),
        report="pytorch/pytorch#170648",
        mended=("torch", "2.15"),
    ),
    Script(
        "lightning-bf16-true",
        *("torchrun", "bugs/lightning_bf16_true.py"),
        findings=(("no-master", "model.experts.0.weight", "master"), ("state-too-narrow", ANY, "state")),
        more=("no-master", "norm-in-16-bits", "router-in-16-bits"),
        needs=("lightning",),
        report="Lightning-AI/pytorch-lightning#18717",
    ),
    Script(
        "hf-trainer-bf16",
        *("torchrun", "bugs/hf_trainer_bf16.py"),
        findings=(("no-master", "model.embed_tokens.weight", "master"), ("state-too-narrow", ANY, "state")),
        more=("no-master", "norm-in-16-bits"),
        needs=TRAINER,
        report="verl-project/verl#5308",
    ),
    _deepspeed(
        "fp16_autocast_clip",
        findings=(("norm-of-scaled-gradients", "", "grad"),),
        report="deepspeedai/DeepSpeed#6993",
    ),
    Script(
        "clip-before-unscale",
        *("torchrun", "bugs/clip_before_unscale.py"),
        findings=(("norm-of-scaled-gradients", "", "grad"),),
    ),
    Script(
        "untied",
        *("torchrun", "bugs/untied.py"),
        findings=(("untied", "lm_head.weight", "storage"),),
        needs=("transformers",),
    ),
    Script(
        "never-updated",
        *("torchrun", "bugs/never_updated.py"),
        findings=(("never-updated", ANY, "master"),),
    ),
    Script(
        "narrow-export",
        *("torchrun", "bugs/narrow_export.py"),
        findings=(("narrow-export", ANY, "export"),),
    ),
    Script(
        "ranks-differ",
        *("torchrun", "bugs/ranks_differ.py"),
        findings=(("ranks-differ", ANY, "storage"),),
    ),
    Script(
        "not-averaged",
        *("torchrun", "bugs/not_averaged.py"),
        findings=(("not-averaged", ANY, "reduce"),),
        report="NVIDIA-NeMo/Automodel#3830",
    ),
)


def _plain(kind: str, launcher: str = "torchrun") -> Script:
    return Script(kind, launcher, "healthy/plain.py", (kind,))


def _zero(stage: int) -> Script:
    return _deepspeed(f"healthy_zero_{stage}", expect=f"configs/healthy_zero_{stage}.json")


HEALTHY: tuple[Script, ...] = (
    _plain("one_process", "python"),
    *map(_plain, ("ddp", "ddp_autocast", "ddp_fp16", "ddp_no_sync", "fsdp2", "fsdp2_norms", "fsdp1")),
    *map(_plain, ("ema", "gan", "distillation", "lora")),
    *map(_zero, (1, 2, 3)),
    Script("accelerate", "accelerate", "healthy/accelerate_bf16.py", needs=("accelerate",)),
    Script("hf-trainer", "torchrun", "healthy/hf_trainer.py", needs=TRAINER),
    Script(
        "hf-trainer-autocast",
        "torchrun",
        "healthy/hf_trainer.py",
        ("bf16",),
        needs=TRAINER,
    ),
    Script(
        "hf-trainer-tied",
        "torchrun",
        "healthy/hf_trainer.py",
        ("tied",),
        needs=TRAINER,
    ),
    Script("lightning", "torchrun", "healthy/lightning_run.py", ("32-true",), needs=("lightning",)),
    Script(
        "lightning-autocast", "torchrun", "healthy/lightning_run.py", ("bf16-mixed",), needs=("lightning",)
    ),
    Script("zerodrift", "torchrun", "healthy/with_zerodrift.py"),
)

BAD: tuple[Bad, ...] = (
    Bad(
        "trains-nothing",
        Script("trains-nothing", "python", "bad/trains_nothing.py"),
        2,
        ("nothing was trained",),
    ),
    Bad("workers", Script("workers", "python", "bad/workers.py"), 0, ("embed.weight",)),
    Bad("crashes", Script("crashes", "python", "bad/crashes.py"), 2, ("the data of step 1", "crashed")),
    Bad(
        "crashes-on-a-rank",
        Script("crashes", "torchrun", "bad/crashes.py"),
        2,
        ("the data of step 1", "crashed"),
    ),
    Bad("is-killed", Script("is-killed", "python", "bad/is_killed.py"), 2, ("killed",)),
    Bad("never-steps", Script("never-steps", "python", "bad/never_steps.py"), 2, ("step",)),
    Bad(
        "several-models",
        Script("several-models", "python", "bad/several_models.py"),
        0,
        ("embed.weight", "no-master"),
    ),
)
"""The value model of `several-models` is bf16, without a master: that is found, the others are shown."""
