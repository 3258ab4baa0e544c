"""Weights out of a pipeline and into it, without a checkpoint: the bytes of a run that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

import zerodrift as zd
from tests.models.architectures import ARCHITECTURES, since, tokens
from tests.models.test_experts import deep
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS, data
from zerodrift.weights import export as exporting
from zerodrift.weights.reader import SafetensorsReader
from zerodrift.weights.writer import SafetensorsWriter


def written(name: str, stage: int, mode: str, schedule: str = "", experts: int = 1) -> dict[str, Any]:
    """A config; with a pipeline where there is a schedule."""
    routers = ARCHITECTURES[name].routers
    rules = [{"match": routers, "pin": "fp32"}] if routers and mode != "fp32" else []
    block = {"pipeline": {"stages": 2, "schedule": schedule, "micro_batches": COUNT}} if schedule else {}
    spread = {"experts": {"ranks": experts}} if experts > 1 else {}
    # Unless told, what is exported has the dtype of the files that a run began with.
    precision = {"rules": rules, "export": mode}
    return config(stage, mode, COUNT, precision=precision, **block, **spread)


def pipeline(name: str, *how: Any, weights: Path | None = None) -> zd.Engine:
    torch.set_num_threads(1)
    with zd.empty():
        model = deep(name)
    return zd.initialize(model, config=written(name, *how), weights=weights, device="cpu", quiet=True)


def batches(rank: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(micro, rank), "labels": tokens(micro, rank)} for micro in range(COUNT)]


def differ(one: Path, two: Path) -> list[str]:
    """Files of two folders that are not the same bytes."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, two)]
    assert names[0] == names[1] and len(names[0]) > 2
    return [name for name in names[0] if (one / name).read_bytes() != (two / name).read_bytes()]


SIZE = "40KB"
"""Of a file of an export: several of them."""


def there_and_back(name: str, mode: str, folder: str, experts: int) -> None:
    """Train in a pipeline and export; into another pipeline that runs, and out again."""
    root = Path(folder)
    first = pipeline(name, 3, mode, "zbv", experts)
    first.train_batch(batches(first.mesh.rank("data")))
    masters = {row.name: first.parameter(row.name).master for row in first.plan.rows}
    zd.export(first, root / "fp32", dtype="fp32", max_shard_size=SIZE)
    zd.export(first, root / "plan", max_shard_size=SIZE)
    zd.export(first, root / "half", dtype="bf16", max_shard_size=None)
    first.destroy()

    other = pipeline(name, 0, mode, "1f1b", experts)
    other.train_batch(batches(other.mesh.rank("data")))
    moments = {row.name: dict(other.parameter(row.name).state) for row in other.plan.rows}
    done = zd.load_weights(other, root / "fp32", quiet=True)
    assert not done.missing and not done.unexpected
    for key, value in masters.items():
        assert torch.equal(other.parameter(key).master, value), key
        for kind, moment in other.parameter(key).state.items():
            assert torch.equal(moment, moments[key][kind]), (key, kind)
    zd.export(other, root / "again", dtype="fp32", max_shard_size=SIZE)
    other.train_batch(batches(other.mesh.rank("data")))  # and goes on
    other.destroy()


def alone(name: str, mode: str, folder: str) -> None:
    """What a run without a pipeline makes of the same masters."""
    root = Path(folder)
    with zd.empty():
        model = deep(name)
    engine = make(written(name, 2, mode), model, weights=root / "fp32")
    zd.export(engine, root / "alone-fp32", dtype="fp32", max_shard_size=SIZE)
    zd.export(engine, root / "alone-plan", max_shard_size=SIZE)
    zd.export(engine, root / "alone-half", dtype="bf16", max_shard_size=None)
    engine.destroy()


CASES = [
    ("llama", "bf16", 1, 2),
    pytest.param("qwen3-moe", "fp32", 2, 4, marks=since("5.0")),
    pytest.param("gpt-oss", "bf16", 1, 2, marks=pytest.mark.slow),
    pytest.param("deepseek-v3", "bf16", 2, 4, marks=pytest.mark.slow),
]
"""(architecture, mode, ranks of experts, ranks); the embeddings of llama are tied across the pipeline."""


@pytest.mark.parametrize(("name", "mode", "experts", "world"), CASES)
def test_files_do_not_know_of_the_pipeline(
    name: str, mode: str, experts: int, world: int, tmp_path: Path
) -> None:
    run_ranks(there_and_back, world, name, mode, str(tmp_path), experts, timeout=200)
    run_ranks(alone, 1, name, mode, str(tmp_path), timeout=100)
    assert differ(tmp_path / "fp32", tmp_path / "again") == []
    for kind in ("fp32", "plan", "half"):
        assert differ(tmp_path / kind, tmp_path / f"alone-{kind}") == []


# --- a model of one's own ---------------------------------------------------------------------------------


class Counting(GPT):
    """Its layers count what they were called with, in buffers that only their stage knows the value of."""

    def __init__(self) -> None:
        super().__init__(LAYERS, tied=False)
        for layer in self.layers:
            layer.register_buffer("calls", torch.zeros(1))
            layer.register_forward_hook(_count)


def _count(module: Any, *_: Any) -> None:
    module.calls.add_(1)


def own(schedule: str, model: torch.nn.Module | None = None) -> zd.Engine:
    torch.set_num_threads(1)
    block = {"stages": 2, "schedule": schedule, "micro_batches": COUNT}
    model = Counting() if model is None else model
    # Reduced once: the one order of sums that no schedule changes.
    written = config(3, "fp32", COUNT, pipeline=block, precision={"reduce": {"when": "last"}})
    return zd.initialize(model, config=written, parts=PARTS, device="cpu", quiet=True)


def own_trained(folder: str) -> None:
    for schedule in ("interleaved", "zbv"):
        engine = own(schedule)
        engine.train_batch(data(0, engine.mesh.rank("data")))
        zd.export(engine, Path(folder) / schedule)
        engine.destroy()
    engine = own("1f1b")
    zd.load_weights(engine, Path(folder) / "zbv", quiet=True)
    zd.export(engine, Path(folder) / "again")
    engine.destroy()


def own_alone(folder: str) -> None:
    torch.set_num_threads(1)
    engine = make(config(3, "fp32", COUNT, precision={"reduce": {"when": "last"}}), Counting())
    for batch in data(0, engine.mesh.rank("data")):
        engine.backward(engine(batch))
        engine.step()
    zd.export(engine, Path(folder) / "alone")
    engine.destroy()


def test_training_and_exporting_is_the_same_bytes_with_buffers_on_their_stages(tmp_path: Path) -> None:
    run_ranks(own_trained, 4, str(tmp_path))
    run_ranks(own_alone, 2, str(tmp_path))
    found = (tmp_path / "alone" / "model.safetensors").read_bytes()
    for name in ("interleaved", "zbv", "again"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == found


# --- what each rank does ----------------------------------------------------------------------------------


def shares(folder: str) -> tuple[int, int]:
    """Bytes that this rank writes and reads."""
    writers: list[SafetensorsWriter] = []

    class Watched(SafetensorsWriter):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            writers.append(self)

    exporting.SafetensorsWriter = Watched  # type: ignore[attr-defined,misc,assignment]
    engine = own("1f1b", GPT(LAYERS, tied=False))
    done = zd.export(engine, Path(folder) / "model")
    count = zd.load_weights(engine, Path(folder) / "model", quiet=True).bytes
    engine.destroy()
    assert count == done.bytes + 4  # the one buffer, on both stages
    return writers[-1].written, done.bytes


def test_each_rank_writes_and_reads_its_own(tmp_path: Path) -> None:
    found = run_ranks(shares, 4, str(tmp_path))
    total = found[0][1]
    assert sum(written for written, _ in found) == total
    assert max(written for written, _ in found) < 0.4 * total


def broken(folder: str) -> list[str]:
    """One stage cannot write, or cannot read: nobody goes on, nobody waits."""
    found = []
    engine = own("1f1b")
    root = Path(folder)
    zd.export(engine, root / "model")
    write, fill = SafetensorsWriter.write, SafetensorsReader.read
    if engine.mesh.rank("pipeline") == 1:
        SafetensorsWriter.write = _fails  # type: ignore[method-assign,assignment]
    found.append(_said(lambda: zd.export(engine, root / "other")))
    SafetensorsWriter.write = write  # type: ignore[method-assign]
    for stage in (0, 1):
        if engine.mesh.rank("pipeline") == stage:
            SafetensorsReader.read = _fails  # type: ignore[method-assign,assignment]
        found.append(_said(lambda: zd.load_weights(engine, root / "model", quiet=True)))
        SafetensorsReader.read = fill  # type: ignore[method-assign]
    zd.load_weights(engine, root / "model", quiet=True)
    engine.train_batch(data(0, engine.mesh.rank("data")))
    engine.destroy()
    return found


def _fails(*_: Any) -> None:
    raise zd.ModelError("part", "must be there", got="no more of it")


def _said(call: Any) -> str:
    try:
        call()
    except zd.ZerodriftError as error:
        return str(error)
    return ""


def test_what_one_stage_cannot_do_none_does(tmp_path: Path) -> None:
    for found in run_ranks(broken, 2, str(tmp_path)):
        assert found == ["`part`: must be there; got no more of it."] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
