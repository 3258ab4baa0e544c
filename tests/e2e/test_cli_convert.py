"""`zerodrift convert` as a person runs it: to and from safetensors, checkpoints, and DeepSpeed's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zerodrift as zd
from tests import commands
from tests.checkpoint_files import tensors
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, make


def convert(*arguments: str | Path, code: int = 0) -> str:
    done = commands.run("convert", *arguments)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Train a model whose routers are pinned; return its checkpoint and its masters."""
    rules = {"precision": {"rules": [{"match": "*.router.*", "pin": "fp32"}]}}
    engine = make(config(2, "bf16", **rules), GPT(moe=True))
    for step in range(2):
        engine.backward(engine(batch(step)))
        engine.step()
    zd.Checkpoints(engine, tmp_path / "run", quiet=True).save()
    masters = {row.name: engine.parameter(row.name).master for row in engine.plan.rows}
    engine.destroy()
    return tmp_path / "run", masters


def test_our_checkpoint_to_safetensors(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Files are in the dtypes of the plan, or in that of `--dtype` except for pinned parameters."""
    said = convert(run[0], tmp_path / "plan", "--max-shard-size", "20KB")
    assert said.startswith("from  a zerodrift checkpoint, step 2\nto    safetensors files:")
    assert "Moments and counters were left out" in said
    convert(run[0] / "step-00000002", tmp_path / "fp16", "--dtype", "fp16")
    plan, half = tensors(tmp_path / "plan"), tensors(tmp_path / "fp16")
    assert plan.keys() == half.keys() == {*run[1], "scale"}
    assert (tmp_path / "plan" / "model.safetensors.index.json").is_file()
    for name, master in run[1].items():
        pinned = ".router." in name
        assert torch.equal(plan[name], master if pinned else master.bfloat16()), name
        assert torch.equal(half[name], master if pinned else master.half()), name


def test_there_and_back_again(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """safetensors become a checkpoint, which an engine loads only without moments."""
    rows = {**run[1], "scale": torch.tensor(0.3333333)}
    save_file({name: value.contiguous() for name, value in rows.items()}, tmp_path / "m.safetensors")
    said = convert(tmp_path / "m.safetensors", tmp_path / "start")
    assert "to    a zerodrift checkpoint:" in said and "moments begin at zero" in said
    back = tmp_path / "back"
    convert(tmp_path / "start", back, "--to", "safetensors")
    found = tensors(back)
    assert found.keys() == rows.keys() and all(torch.equal(found[name], rows[name]) for name in rows)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """Experts are stacked in the module and separate in the files: `--model` converts both ways."""
    pytest.importorskip("transformers")
    from tests.models.architectures import ARCHITECTURES

    model = ARCHITECTURES["qwen3-moe"].model()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    said = convert(tmp_path / "model", tmp_path / "start")
    assert "safetensors files of a Qwen3MoeForCausalLM" in said
    fresh = ARCHITECTURES["qwen3-moe"].model()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    written = config(3, "fp32")
    engine = make(written, fresh)
    checkpoints = zd.Checkpoints(engine, tmp_path / "start", quiet=True)
    checkpoints.load(allow=("optimizer",))
    with engine.gathered() as values:
        assert all(torch.equal(values[name], value) for name, value in model.named_parameters())
    engine.destroy()
    convert(tmp_path / "start", tmp_path / "out", "--model", tmp_path / "model", "--dtype", "fp32")
    expected, found = tensors(tmp_path / "model"), tensors(tmp_path / "out")
    assert found.keys() == expected.keys() and any(".experts.3." in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3_moe"


REFUSED = {
    "empty out": "got a folder with none of them",
    "run out --to pickle": "is not one of 'safetensors', 'checkpoint'",
    "run out --dtype int3": "`--dtype`: must be fp32, bf16, fp16, fp8-128x128",
    "run out --model llama": "is not of a LlamaForCausalLM",
    "run full": "say `--overwrite`",
    "cut out": "bytes that were written",
}
"""Arguments, in a folder with a checkpoint in `run` and one that is cut off in `cut` -> the error."""


def test_what_is_refused(run: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests.models.architectures import ARCHITECTURES

    monkeypatch.chdir(run[0].parent)
    Path("empty").mkdir()
    ARCHITECTURES["llama"].model().config.save_pretrained("llama")
    shutil.copytree("run", "cut")
    data = next(Path("cut/step-00000002").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    for overwrite in ([], ["--overwrite"]):
        convert("run", "full", *overwrite)
    for arguments, said in REFUSED.items():
        assert said in convert(*arguments.split(), code=2), arguments
        assert not Path("out").exists()
