"""Every example in the help of a verb runs, in a folder with the files that it names.

Only arguments that no file can stand for are replaced: a number of ranks, a checkpoint's step, the place
of a function.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from typer.main import get_command

from tests import commands
from tests.unit.data_files import jsonl
from zerodrift.cli import app

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
VERBS = get_command(app).commands  # type: ignore[attr-defined]

INSTEAD = {
    "-node=8": "-node=2",
    "-node 8": "-node 2",
    "-gpus 8": "-gpus 2",
    "steps=100": "steps=3",
    "step-00000200": "step-00000002",
    "package.module:function": "examples.jobs.own_model:build",
    "--model X": "--model path/to/model",
    "layers.3.mlp.router": "layers.3.mlp.gate",
}
ELSEWHERE = {
    "-- trl ": "tests/doors, with the trainers of others",
    "-- llamafactory-cli ": "tests/doors, with the trainers of others",
    "-- deepspeed train.py": "tests/check/test_gallery.py, beside DeepSpeed",
    "convert ds_run": "tests/e2e/test_cli_convert.py, beside DeepSpeed",
}
"""Words of an example that needs another library -> the test that runs it."""

TRAIN = """
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    tokens = torch.randint(250, (2, 16))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WITH_DEEPSPEED = """
import deepspeed
import torch

engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config="ds.json")
for _ in range(2):
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
"""
JOB = {
    "model": {"source": "path/to/model"},
    "data": {"train": "chats.jsonl", "tokenizer": "bytes", "validation": 0.2, "block": 64},
    "run": {"folder": "runs/chat", "steps": 2, "checkpoint_every": 1},
    "config": {
        "precision": {"mode": "bf16"},
        "zero_optimization": {"stage": 3},
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    },
}
DS = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


def run(home: Path, line: str) -> str:
    """Run a line, require exit code 0, and return the output."""
    words = shlex.split(line.partition(" > ")[0], comments=True)
    bin = Path(sys.executable).parent
    environment = {
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if words[0] == "zerodrift":
        done = commands.run(*words[1:], folder=home, timeout=300, **environment)
    else:
        done = subprocess.run(
            words, cwd=home, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with everything that examples name: the copied examples, a model, texts, tokens, runs."""
    home = tmp_path_factory.mktemp("home")
    run(home, "zerodrift examples --copy")
    source = home / "examples" / "qwen3-moe-tiny"
    config = transformers.AutoConfig.from_pretrained(source, max_position_embeddings=4096)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(home / "path" / "to" / "model")
    ids = torch.randint(250, (4, 24))
    with torch.no_grad():
        told = model(ids).logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    numpy.save(home / "ids.npy", ids.numpy())
    pairs = list(zip(ids.tolist(), told.tolist(), strict=True))
    jsonl(home / "ids.jsonl", [{"tokens": tokens} for tokens, _ in pairs])
    jsonl(home / "server.jsonl", [{"tokens": tokens, "logprobs": values} for tokens, values in pairs])
    shutil.copy(home / "examples" / "jobs" / "data" / "columns.jsonl", home / "chats.jsonl")
    for name, written in {
        "config.yaml": {"precision": {"mode": "bf16"}},
        "job.yaml": JOB,
        "ds.json": DS,
    }.items():
        (home / name).write_text(json.dumps(written))
    (home / "vllm.yaml").write_text("compute: bf16\n")
    (home / "train.py").write_text(TRAIN)
    (home / "zero3.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    (home / "path" / "to" / "other" / "text").mkdir(parents=True)
    shutil.copy(home / "chats.jsonl", home / "path" / "to" / "other" / "text")
    run(home, "zerodrift train examples/jobs/lab.yaml --nproc 2")
    run(home, "zerodrift train job.yaml")
    run(home, "zerodrift train examples/jobs/lora.yaml --set run.folder=runs/a")
    run(home, "zerodrift check --save precision.json -- python train.py")
    shutil.copy(home / "precision.json", home / "before.json")
    shutil.copy(home / "precision.json", home / "after.json")
    return home


def examples(verb: str) -> list[str]:
    text = (VERBS[verb].help or "").partition("Example")[2].replace("\\\n", " ")
    lines = re.findall(r"^ *((?:zerodrift|torchrun) .*)", text, re.MULTILINE)
    return [line for line in lines if not any(words in line for words in ELSEWHERE)]


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_verb_run(verb: str, home: Path) -> None:
    (home / "train.py").write_text(WITH_DEEPSPEED if verb == "run" else TRAIN)
    written = INSTEAD
    if verb == "examples":
        shutil.rmtree(home / "examples")
    if verb == "drift":  # the same names as of another run elsewhere
        written = {**INSTEAD, "runs/a": "runs/chat", "exported": "runs/chat/export"}
    lines = examples(verb)
    assert lines
    for line in lines:
        for words, instead in written.items():
            line = line.replace(words, instead)
        run(home, line)
