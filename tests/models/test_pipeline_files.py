"""Weights are exported from a pipeline and loaded into one with the bytes of a run without a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.runs import config, diff, make, masters, require_alike, whole_values
from tests.numerics.runs import train as train_whole
from tests.ranks.harness import on_ranks, run_ranks

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

import zerodrift as zd
from tests.models.architectures import deep, labelled, rules, since
from tests.numerics.test_pipelines import COUNT, LAYERS, data, pipeline
from zerodrift.weights.reader import SafetensorsReader
from zerodrift.weights.writer import SafetensorsWriter


def config_of(name: str, stage: int, mode: str, experts: int = 1) -> dict[str, Any]:
    spread = {"experts": {"ranks": experts}} if experts > 1 else {}
    # Unless told, what is exported has the dtype of the files that a run began with.
    precision = {"rules": rules(name) if mode != "fp32" else [], "export": mode}
    return config(stage, mode, COUNT, precision=precision, **spread)


def cut(name: str, schedule: str, *how: Any) -> zd.Engine:
    with zd.empty():
        model = deep(name)
    return pipeline(config_of(name, *how), schedule, None, model, None)


def train(engine: zd.Engine) -> None:
    engine.train_batch([labelled(micro, engine.mesh.rank("data")) for micro in range(COUNT)])


def export_all(engine: zd.Engine, root: Path, prefix: str = "") -> None:
    zd.export(engine, root / f"{prefix}fp32", dtype="fp32", max_shard_size=SIZE)
    zd.export(engine, root / f"{prefix}plan", max_shard_size=None)


def differ(one: Path, two: Path) -> list[str]:
    """Return the files of two folders that differ."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, two)]
    assert names[0] == names[1] and len(names[0]) > 2
    return [name for name in names[0] if (one / name).read_bytes() != (two / name).read_bytes()]


SIZE = "40KB"
"""Size of a file of an export, so that there are several."""


def there_and_back(name: str, mode: str, folder: str, experts: int) -> None:
    """Train in a pipeline and export; load the files into another pipeline and export again."""
    root = Path(folder)
    first = cut(name, "zbv", 3, mode, experts)
    train(first)
    values = masters(first)
    export_all(first, root)
    first.destroy()

    other = cut(name, "1f1b", 0, mode, experts)
    train(other)
    before = whole_values(other)
    done = zd.load_weights(other, root / "fp32", quiet=True)
    assert not done.missing and not done.unexpected
    after = whole_values(other)
    require_alike(values, masters(other))
    del after["master"]
    assert after and all(diff(before[kind], moments) == [] for kind, moments in after.items())
    zd.export(other, root / "again", dtype="fp32", max_shard_size=SIZE)
    train(other)  # and goes on


def alone(name: str, mode: str, folder: str) -> None:
    """Export the same masters from a run without a pipeline."""
    root = Path(folder)
    with zd.empty():
        model = deep(name)
    engine = make(config_of(name, 2, mode), model, weights=root / "fp32")
    export_all(engine, root, "alone-")


@pytest.mark.parametrize(
    ("name", "mode", "experts", "world"),
    [
        ("llama", "bf16", 1, 2),  # embeddings tied across the pipeline
        pytest.param("qwen3-moe", "fp32", 2, 4, marks=since("5.0")),
        pytest.param("gpt-oss", "bf16", 1, 2, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "bf16", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_files_do_not_know_of_the_pipeline(
    name: str, mode: str, experts: int, world: int, tmp_path: Path
) -> None:
    run_ranks(there_and_back, world, name, mode, str(tmp_path), experts, timeout=200)
    run_ranks(alone, 1, name, mode, str(tmp_path), timeout=100)
    assert differ(tmp_path / "fp32", tmp_path / "again") == []
    for kind in ("fp32", "plan"):
        assert differ(tmp_path / kind, tmp_path / f"alone-{kind}") == []


class Counting(GPT):
    """A model whose layers count their calls, in buffers of their own stage."""

    def __init__(self) -> None:
        super().__init__(LAYERS, tied=False)
        for layer in self.layers:
            layer.register_buffer("calls", torch.zeros(1))
            layer.register_forward_hook(lambda module, *_: module.calls.add_(1) and None)


# Reduced once: the one order of sums that no schedule changes.
WRITTEN = config(3, "fp32", COUNT, precision={"reduce": {"when": "last"}})


def own(schedule: str) -> zd.Engine:
    return pipeline(WRITTEN, schedule, None, Counting())


def export_own(folder: Path, staged: bool) -> None:
    if staged:
        engine = own("zbv")
        engine.train_batch(data(0, engine.mesh.rank("data")))
        zd.export(engine, folder / "staged")
        engine = own("1f1b")
        zd.load_weights(engine, folder / "staged", quiet=True)
        zd.export(engine, folder / "again")
    else:
        engine = make(WRITTEN, Counting())
        train_whole(engine, 1, COUNT)
        zd.export(engine, folder / "alone")


def test_training_and_exporting_is_the_same_bytes_with_buffers_on_their_stages(tmp_path: Path) -> None:
    run_ranks(export_own, 4, tmp_path, True)
    run_ranks(export_own, 2, tmp_path, False)
    names = ("alone", "staged", "again")
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in names}) == 1


@on_ranks(2)
def test_what_one_stage_cannot_do_none_does(tmp_path: Path) -> None:
    """When one stage cannot write, or cannot read, no rank goes on and no rank waits."""
    engine = own("1f1b")
    zd.export(engine, tmp_path / "model")
    write, read = SafetensorsWriter.write, SafetensorsReader.read
    for stage, kind, name, act in (
        (1, SafetensorsWriter, "write", lambda: zd.export(engine, tmp_path / "other")),
        (0, SafetensorsReader, "read", lambda: zd.load_weights(engine, tmp_path / "model", quiet=True)),
        (1, SafetensorsReader, "read", lambda: zd.load_weights(engine, tmp_path / "model", quiet=True)),
    ):
        if engine.mesh.rank("pipeline") == stage:
            setattr(kind, name, _fails)
        with pytest.raises(zd.ZerodriftError, match=r"^`part`: must be there; got no more of it\."):
            act()
        SafetensorsWriter.write, SafetensorsReader.read = write, read  # type: ignore[method-assign]
    zd.load_weights(engine, tmp_path / "model", quiet=True)
    engine.train_batch(data(0, engine.mesh.rank("data")))
    engine.destroy()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _fails(*_: Any) -> None:
    raise zd.ModelError("part", "must be there", got="no more of it")
