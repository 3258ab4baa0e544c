"""The command `deepspeed SCRIPT`, on this machine.

torchrun starts the processes, ends all of them when one fails, and passes signals on. This file selects GPUs
by DeepSpeed's options, and passes `--local_rank` to each process. Options for several machines are refused,
because zerodrift does not start processes by ssh.

Invariant: an option without effect cannot change training; any other option is obeyed or refused.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

import torch
from torch.distributed.run import main as torchrun

from zerodrift.deepspeed.tools.collectives import PORT, local_rank
from zerodrift.errors import Problems, UnsupportedError

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

START_RANK = "--start-rank"
_ELSEWHERE = "Start `zerodrift run -- torchrun --nnodes ...` on each machine."


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse DeepSpeed's options, the script, and the script's arguments. Options without help have no effect
    or are refused."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="Start a script on the GPUs of this machine, with zerodrift."
    )
    add = parser.add_argument
    count = "number of processes; default: all GPUs"
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help=count)
    add("-i", "--include", default="", help="GPUs to use: localhost:0,2")
    add("-e", "--exclude", default="", help="GPUs not to use: localhost:1")
    add("--master_port", type=int, default=PORT, help="the port of rank 0")
    add("--master_addr", default="127.0.0.1", help="the address of rank 0")
    add("--module", action="store_true", help="the script is a module, as for python -m")
    add("--no_python", action="store_true", help="the script is a program")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    hidden = argparse.SUPPRESS
    texts = (
        "launcher launcher_args venv_script log_level ssh_port autotuning enable_each_rank_log bind_core_list"
    )
    numbers = "num_nodes node_rank min_elastic_nodes max_elastic_nodes"
    switches = "no_ssh no_ssh_check force_multi elastic_training save_pid bind_cores_to_rank"
    add("-H", "--hostfile", default="", help=hidden)
    add("-q", "--quiet", action="store_true", help=hidden)
    for name in texts.split():
        add(f"--{name}", default="", help=hidden)
    for name in numbers.split():
        add(f"--{name}", type=int, default=-1, help=hidden)
    for name in switches.split():
        add(f"--{name}", action="store_true", help=hidden)
    add("user_script", help="the script")
    add("user_args", nargs=argparse.REMAINDER, help="its own arguments")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Start the script on all ranks. Raises torchrun's error if a rank fails."""
    given = parse_args(args)
    try:
        _refuse(given)
        devices = _devices(given.include, given.exclude)
    except UnsupportedError as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)
        sys.exit(2)
    count = (
        given.num_gpus if given.num_gpus > 0 else len(devices or ()) or torch.accelerator.device_count() or 1
    )
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    torchrun(_arguments(given, count))  # here, since another process would import torch again


def _arguments(given: argparse.Namespace, count: int) -> list[str]:
    ranks = [f"--nproc-per-node={count}"]
    ranks += [f"--master-addr={given.master_addr}", f"--master-port={given.master_port}"]
    kind = ["--no-python"] if given.no_python else ["-m"] if given.module else []
    start = kind if given.no_local_rank else ["-m", "zerodrift.deepspeed.runner", START_RANK, *kind]
    return [*ranks, *start, given.user_script, *given.user_args]


def _refuse(given: argparse.Namespace) -> None:
    problems = Problems()
    several = given.num_nodes > 1 or given.force_multi or given.node_rank > 0 or given.elastic_training
    if several or os.path.isfile(given.hostfile):
        problems.add("deepspeed", "must start processes on this machine only", got="several", do=_ELSEWHERE)
    if given.autotuning:
        do = "`zerodrift plan` prints memory and traffic of a config without running it."
        problems.add("--autotuning", "must be left out", got=given.autotuning, do=do)
    if given.no_python and given.module:
        problems.add("--no_python", "must not come with `--module`", got="both", do="Keep one.")
    if (given.include or given.exclude) and given.num_gpus >= 0:
        must = "must not come with `--include` or `--exclude`"
        problems.add("--num_gpus", must, got="both", do="Keep one.")
    problems.raise_as(UnsupportedError)


def _devices(include: str, exclude: str) -> list[int] | None:
    """Return the GPUs to use, or None if no option names any."""
    if include and ":" in include:
        return _slots("--include", include)
    if exclude:
        left_out = _slots("--exclude", exclude)
        return [number for number in range(torch.cuda.device_count()) if number not in left_out]
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


def start_rank() -> None:
    """Run the script of `sys.argv` with `--local_rank` before its own arguments."""
    kind = sys.argv.pop(2) if sys.argv[2] in ("-m", "--no-python") else ""
    del sys.argv[:2]
    script = sys.argv[0]
    sys.argv.insert(1, f"--local_rank={local_rank()}")
    if kind == "--no-python":
        os.execvp(script, sys.argv)
    elif kind == "-m":
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == [START_RANK]:
        start_rank()
    else:
        main()
