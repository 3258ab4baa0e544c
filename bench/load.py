"""Loading a checkpoint into shards beside others: seconds, peak memory per rank, bytes read.

    python bench/load.py                          # a 1 GB bf16 checkpoint, bf16 and fp32 targets
    python bench/load.py --gigabytes 2 --only plain,zerodrift,zerodrift-adamw
    python bench/load.py --rounds 5
    python bench/load.py --folder models/a --dtype fp32 --only zerodrift,dcp

Two gloo ranks, one thread each, a fresh pair of processes per engine and round. Engines take turns, each
round begins with another one, and seconds are medians of the slower rank's. The checkpoint is a Llama of
random weights, made in a temporary folder and removed unless `--folder` has one, and is in the page cache.

What is timed is the same for all: imports and a process group of the script's are there before; the clock
covers building the model, dividing it, allocating what rests, reading, and a barrier. For DCP that is a model
on the meta device, `fully_shard`, `to_empty` and its reader. For zerodrift it is everything until an engine
could train: `empty()`, a process group of its own, the plan, the engine with its hooks. Before the clock
every process touches about as much memory as it will use and lets it go: a virtual machine that has given
free pages back to its host pays several times as much for their first touch as for any later one, and whose
turn that is should not be chance. `cpu s` is what the slower rank computed, faults of fresh pages included;
the rest of `s` it waited, for the other rank or for a core.

`share` is what a rank holds when it is done, computed; `beyond` is the peak resident memory minus what the
process had before and minus that share. `plain` reads each rank's half of the files into one buffer and keeps
nothing: the floor of seconds. Bytes are what the operating system counted for both ranks, beside what the
loader says it read; what others read through a memory map is not in its count. In the first round what is
loaded is compared with the files afterwards, except by `plain`. `transformers`' table of conversions, which
`from_pretrained` and zerodrift honour and the others do not look at, is built once per process, before
anything is measured, like an import. Needs Linux and `transformers`; DeepSpeed is left out where it is not
installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, flags

RANKS = 2
HEADERS = 1 << 20
"""Bytes beyond the tensors that a rank may read: headers, index, config, the files of imported code."""

Held = Iterable[tuple[str, torch.Tensor]]
"""Names and full values, gathered by all ranks together, to be compared with the files."""
Load = Callable[[Path, torch.dtype], tuple[int, Callable[[], Held]]]
"""(folder, dtype to hold) -> bytes that the loader says this rank read (0: it does not), and the values."""


def write(folder: Path, gigabytes: float) -> None:
    """Write a Llama in bf16, in shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round((gigabytes * 1e9 / 2 - 131e6) / 45e6))
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM._from_config(config).save_pretrained(folder, max_shard_size="300MB")


def tensors_in(folder: Path) -> int:
    """Return the bytes of all tensors."""
    from zerodrift.model.safetensors import list_tensors

    return sum(tensor.stop - tensor.start for tensor in list_tensors(folder))


# --- the engines ----------------------------------------------------------------------------------------


def plain(folder: Path, dtype: torch.dtype) -> tuple[int, Callable[[], Held]]:
    from zerodrift.model.safetensors import list_tensors

    room, count, files = bytearray(8 << 20), 0, {}
    for tensor in list_tensors(folder):
        number = files.setdefault(tensor.file, None) or os.open(tensor.file, os.O_RDONLY)
        files[tensor.file] = number
        half = (tensor.stop - tensor.start) // RANKS
        place, stop = tensor.start + dist.get_rank() * half, tensor.start + (dist.get_rank() + 1) * half
        while place < stop:
            got = os.preadv(number, [memoryview(room)[: stop - place]], place)
            place, count = place + got, count + got
    for number in files.values():
        os.close(number)
    return count, lambda: ()


def zerodrift(folder: Path, dtype: torch.dtype, train: bool = False) -> tuple[int, Callable[[], Held]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from zerodrift import empty, initialize
    from zerodrift.weights.reader import SafetensorsReader

    readers: list[SafetensorsReader] = []
    made = SafetensorsReader.__init__

    def counted(self: SafetensorsReader, *args: Any) -> None:
        made(self, *args)
        readers.append(self)

    SafetensorsReader.__init__ = counted  # type: ignore[method-assign]
    with empty():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.requires_grad_(train)
    config: dict[str, Any] = {
        "precision": {"mode": "bf16", "storage": "bf16" if dtype is torch.bfloat16 else "fp32"},
        "zero_optimization": {"stage": 3},
    }
    if train:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
    engine = initialize(model, config=config, weights=folder, device="cpu", quiet=True)

    def values() -> Held:
        for row in engine.plan.rows:
            yield row.name, engine.parameter(row.name).master

    return sum(reader.count for reader in readers), values


def sharded(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def full(model: nn.Module) -> Held:
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor().detach()


def from_pretrained(folder: Path, dtype: torch.dtype) -> tuple[int, Callable[[], Held]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    sharded(model)
    return 0, lambda: full(model)


def on_meta(folder: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


def broadcast(folder: Path, dtype: torch.dtype) -> tuple[int, Callable[[], Held]]:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model, state = on_meta(folder, dtype), {}
    sharded(model)
    model.to_empty(device="cpu")
    if dist.get_rank() == 0:
        for file in sorted(folder.glob("*.safetensors")):
            state |= {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return 0, lambda: full(model)


def dcp(folder: Path, dtype: torch.dtype) -> tuple[int, Callable[[], Held]]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    model = on_meta(folder, dtype)
    sharded(model)
    model.to_empty(device="cpu")
    load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))
    return 0, lambda: full(model)


def deepspeed(folder: Path, dtype: torch.dtype) -> tuple[int, Callable[[], Held]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype is torch.bfloat16},
    }
    kept = HfDeepSpeedConfig(config)  # what makes `from_pretrained` build inside `zero.Init`
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def values() -> Held:
        assert kept is not None
        for name, parameter in model.named_parameters():
            with ds.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()

    return 0, values


ENGINES: dict[str, Load] = {
    "plain": plain,
    "zerodrift": zerodrift,
    "zerodrift-adamw": lambda folder, dtype: zerodrift(folder, dtype, train=True),
    "from_pretrained": from_pretrained,
    "broadcast": broadcast,
    "dcp": dcp,
    "deepspeed": deepspeed,
}
"""Name -> how it loads. `-adamw` also makes masters and moments, which its share then has."""


def share(name: str, dtype: torch.dtype, elements: int) -> float:
    """Return the bytes that a rank is to hold in the end."""
    if name == "plain":
        return 0.0
    kept = dtype.itemsize
    if name == "zerodrift-adamw":
        kept = 2 + 2 + 8 if dtype is torch.bfloat16 else 4 + 8
    return kept * elements / RANKS


def used(name: str, dtype: torch.dtype, elements: int) -> int:
    """Estimate the peak bytes of a rank: the whole model and more where an engine loads it whole."""
    whole = name in ("from_pretrained", "broadcast", "deepspeed")
    return int(share(name, dtype, elements) * (3 if whole else 1.1))


# --- a measurement --------------------------------------------------------------------------------------


def status(field: str) -> int:
    """Return a line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def bytes_read() -> int:
    """Return the bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(
    rank: int, store: str, name: str, folder: str, dtype: torch.dtype, most: int, check: bool, queue: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29534")
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=RANKS)
    warm(name)
    touch(most)
    dist.barrier()
    base, asked = status("VmRSS"), bytes_read()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    computed, start = time.process_time(), time.perf_counter()
    said, values = ENGINES[name](Path(folder), dtype)
    computed = time.process_time() - computed
    dist.barrier()
    found = {
        "seconds": time.perf_counter() - start,
        "cpu": computed,
        "peak": status("VmHWM") - base,
        "asked": bytes_read() - asked,
        "said": said,
    }
    found["wrong"] = compare(Path(folder), dtype, values()) if check else 0
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, found)
    if rank == 0:
        queue.put(every)
    dist.barrier()


def warm(name: str) -> None:
    """Import the packages of an engine before the clock starts."""
    modules = ["transformers.models.llama.modeling_llama", "zerodrift.api", "zerodrift.weights.load"]
    modules += ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"]
    modules += ["zerodrift.engine.engine", "zerodrift.report.terminal", "zerodrift.optim.flat"]
    if name == "deepspeed":
        os.environ["DS_ACCELERATOR"] = "cpu"
        modules += ["deepspeed", "transformers.integrations.deepspeed"]
    for module in modules:
        importlib.import_module(module)
    table = importlib.import_module("transformers.conversion_mapping")
    start = time.perf_counter()
    table.get_checkpoint_conversion_mapping("llama")
    if dist.get_rank() == 0 and name == "zerodrift":
        print(f"(transformers built its table of conversions in {time.perf_counter() - start:.2f} s, before)")


def touch(count: int) -> None:
    """Touch so many bytes and free them, so that the machine has the pages at hand."""
    torch.empty(count, dtype=torch.uint8).fill_(1)


def compare(folder: Path, dtype: torch.dtype, held: Held) -> int:
    """Count the parameters whose bits differ from the file's. Collective, after all measurements."""
    from safetensors import safe_open

    where = {}
    with contextlib.ExitStack() as stack:
        for file in sorted(folder.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            where |= dict.fromkeys(opened.keys(), opened)
        return sum(
            not torch.equal(values.to(dtype), where[name].get_tensor(name).to(dtype)) for name, values in held
        )


def launch(name: str, folder: Path, dtype: torch.dtype, most: int, check: bool) -> list[dict[str, Any]]:
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as store:
        ranks = mp.start_processes(
            measure,
            args=(store, name, str(folder), dtype, most, check, queue),
            nprocs=RANKS,
            join=False,
            start_method="spawn",
        )
        while not ranks.join(timeout=1):
            pass
    return queue.get()


def show(
    result: Result, names: list[str], dtype: torch.dtype, rounds: dict[str, list[Any]], size: int
) -> None:
    text = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    columns = {f"{text} on each rank": "<18", "s": ".2f", f"of {names[0]}": ".2f", "cpu s": ".2f"}
    columns |= dict.fromkeys(("peak MB", "share", "beyond"), ".0f")
    table = result.table({**columns, "read MB": ".1f", "said": ".1f", "wrong": ""})
    floor = statistics.median(max(r["seconds"] for r in ranks) for ranks in rounds[names[0]])
    for name in names:
        seconds = statistics.median(max(r["seconds"] for r in ranks) for ranks in rounds[name])
        computed = statistics.median(max(r["cpu"] for r in ranks) for ranks in rounds[name])
        peak = max(r["peak"] for ranks in rounds[name] for r in ranks)
        asked = statistics.median(sum(r["asked"] for r in ranks) for ranks in rounds[name])
        counted = sum(r["said"] for r in rounds[name][0])
        wrong = max(r["wrong"] for ranks in rounds[name] for r in ranks)
        holds = share(name, dtype, size // 2)
        memory = (each / 1e6 for each in (peak, holds, peak - holds, asked, counted))
        table.row(name, seconds, seconds / floor, computed, *memory, wrong)
        if wrong:
            raise SystemExit(f"{name}: {wrong} parameters are not the bits of the files")
        if name.startswith("zerodrift") and not counted == size <= asked < size + RANKS * HEADERS:
            raise SystemExit(f"{name}: read {counted:,} and asked for {asked:,} bytes of {size:,}")


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="a folder of a Llama in bf16, instead of making one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="comma-separated engines; the first is what ratios are to")
    parser.add_argument("--dtype", choices=["bf16", "fp32", "both"], default="both")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(ENGINES)
    if unknown := [name for name in names if name not in ENGINES]:
        parser.error(f"unknown engines: {', '.join(unknown)}; known: {', '.join(ENGINES)}")
    if importlib.util.find_spec("deepspeed") is None:
        names = [name for name in names if name != "deepspeed"]
    dtypes = {"bf16": [torch.bfloat16], "fp32": [torch.float32]}.get(
        options.dtype, [torch.bfloat16, torch.float32]
    )
    with contextlib.ExitStack() as stack:
        folder = options.folder or make_checkpoint(stack, options.gigabytes)
        size = tensors_in(folder)
        files = len(list(folder.glob("*.safetensors")))
        setting = f"{size / 1e9:.3f} GB of tensors in {files} files, {RANKS} ranks, {options.rounds} rounds"
        result = Result.begin(setting, options, "transformers", "deepspeed")
        for dtype in dtypes:
            rounds: dict[str, list[Any]] = {name: [] for name in names}
            for first in range(options.rounds):
                for turn in range(len(names)):
                    engine = names[(first + turn) % len(names)]
                    most = used(engine, dtype, size // 2)
                    rounds[engine].append(launch(engine, folder, dtype, most, check=first == 0))
            show(result, names, dtype, rounds, size)
        result.save(options.save)


def make_checkpoint(stack: contextlib.ExitStack, gigabytes: float) -> Path:
    """Write a checkpoint that is removed with `stack`."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    maker = mp.get_context("spawn").Process(target=write, args=(folder, gigabytes))
    maker.start()
    maker.join()
    return folder


if __name__ == "__main__":
    main()
