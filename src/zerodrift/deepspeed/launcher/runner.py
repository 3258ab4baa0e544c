"""`deepspeed.launcher.runner`: the command `deepspeed SCRIPT`, on this machine.

The processes are torchrun's: it starts them, ends all of them when one fails, and passes signals on. What
DeepSpeed's launcher adds is done here and in `rank.py`: the choice of GPUs, and `--local_rank`. Several
machines are torchrun's business too, one call on each; what would reach them by ssh is refused.

Invariant: an option that is not obeyed changes nothing in what is trained, or is refused.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from zerodrift.deepspeed.launch import PORT
from zerodrift.errors import Problems, UnsupportedError

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file with variables for other machines. accelerate writes it."""

_ELSEWHERE = "Start `zerodrift run -- torchrun --nnodes ...` on each machine."


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's options, and the script with its own behind them."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="Start a script on the GPUs of this machine, with zerodrift."
    )
    add = parser.add_argument
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="how many processes; all GPUs if left out",
    )
    add("-i", "--include", default="", help="GPUs to use: localhost:0,2")
    add("-e", "--exclude", default="", help="GPUs not to use: localhost:1")
    add("--master_port", type=int, default=PORT, help="where ranks meet")
    add("--master_addr", default="127.0.0.1", help="where ranks meet")
    add("--module", action="store_true", help="the script is a module, as for python -m")
    add("--no_python", action="store_true", help="the script is a program")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    for name in (
        "-H/--hostfile",
        "--launcher",
        "--launcher_args",
        "--venv_script",
        "--log_level",
        "--ssh_port",
    ):
        add(*name.split("/"), default="", help=argparse.SUPPRESS)
    for name in ("--num_nodes", "--node_rank", "--min_elastic_nodes", "--max_elastic_nodes"):
        add(name, type=int, default=-1, help=argparse.SUPPRESS)
    for name in ("--no_ssh", "--no_ssh_check", "--force_multi", "--elastic_training", "--save_pid"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--enable_each_rank_log", "--autotuning", "--bind_core_list"):
        add(name, default="", help=argparse.SUPPRESS)
    add("--bind_cores_to_rank", action="store_true", help=argparse.SUPPRESS)
    add("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    add("user_script", help="the script")
    add("user_args", nargs=argparse.REMAINDER, help="its own arguments")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Start it, and end as it ends."""
    given = parse_args(args)
    try:
        _refuse(given)
        devices = _devices(given.include, given.exclude)
    except UnsupportedError as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)
        sys.exit(2)
    environment = dict(os.environ)
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    count = given.num_gpus if given.num_gpus > 0 else len(devices or ()) or torch.cuda.device_count() or 1
    code = subprocess.call(command(given, count), env=environment)
    if code:
        sys.exit(code if code > 0 else 128 - code)


def command(given: argparse.Namespace, count: int) -> list[str]:
    """The call of torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    torchrun += [f"--master-addr={given.master_addr}", f"--master-port={given.master_port}"]
    kind = ["--no-python"] if given.no_python else ["-m"] if given.module else []
    start = kind if given.no_local_rank else ["-m", "zerodrift.deepspeed.launcher.rank", *kind]
    return [*torchrun, *start, given.user_script, *given.user_args]


def _refuse(given: argparse.Namespace) -> None:
    problems = Problems()
    several = given.num_nodes > 1 or given.force_multi or given.node_rank > 0 or given.elastic_training
    if several or os.path.isfile(given.hostfile):
        problems.add("deepspeed", "must start processes of this machine alone", got="several", do=_ELSEWHERE)
    if given.autotuning:
        problems.add(
            "--autotuning",
            "must be left out",
            got=given.autotuning,
            do="`zerodrift plan` prints memory and traffic of a config without running it.",
        )
    if given.no_python and given.module:
        problems.add("--no_python", "must not come with `--module`", got="both", do="Keep one.")
    if (given.include or given.exclude) and given.num_gpus >= 0:
        problems.add(
            "--num_gpus", "must not come with `--include` or `--exclude`", got="both", do="Keep one."
        )
    problems.raise_as(UnsupportedError)


def _devices(include: str, exclude: str) -> list[int] | None:
    """The GPUs that are named, or those that are left; None where nothing is said."""
    if include and ":" in include:
        return _slots("--include", include)
    if exclude:
        gone = _slots("--exclude", exclude)
        return [number for number in range(torch.cuda.device_count()) if number not in gone]
    return None


def _slots(option: str, text: str) -> list[int]:
    host, _, slots = text.partition(":")
    try:
        numbers = [int(slot) for slot in slots.split(",")]
    except ValueError:
        numbers = []
    if host not in ("localhost", "127.0.0.1") or not numbers:
        raise UnsupportedError(option, "must name GPUs as `localhost:0,1`", got=repr(text), do=_ELSEWHERE)
    return numbers


if __name__ == "__main__":
    main()
