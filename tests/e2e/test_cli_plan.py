"""`plan`, `explain` and `support` as a person runs them: a process, files, pipes, exit codes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zerodrift
from tests.commands import run
from tests.unit.test_report_page import read as read_page
from zerodrift.plan.table import Plan
from zerodrift.policy.decisions import COLUMNS

LAYERS, EXPERTS, WIDTH = 4, 4, 32
CLUSTERS = Path(zerodrift.__file__).parent / "inspect" / "simulate" / "clusters"

CONFIG = """\
precision:
  mode: bf16
  rules:
    - match: "*.router.weight"
      pin: fp32
zero_optimization: {stage: 3, overlap_comm: true}
gradient_accumulation_steps: 4
optimizer: {type: AdamW, params: {lr: 1.0e-4}}
"""


Files = tuple[str, str, str]
"""A config, `--model`, and a model on disk."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a small mixture of experts."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (256, WIDTH),
        "lm_head.weight": (256, WIDTH),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found[f"{at}.self_attn.q_proj.weight"] = (WIDTH, WIDTH)
        found[f"{at}.mlp.router.weight"] = (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            found[f"{at}.mlp.experts.{expert}.up_proj.weight"] = (2 * WIDTH, WIDTH)
        found[f"{at}.input_layernorm.weight"] = (WIDTH,)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.yaml").write_text(CONFIG)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes().items()}
    save_file(tensors, folder / "model.safetensors")
    return str(folder / "config.yaml"), "--model", str(folder / "model.safetensors")


def ok(*arguments: str | Path, **environment: str) -> str:
    done = run(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def refusal(*arguments: str | Path) -> str:
    done = run(*arguments)
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert done.stderr.startswith("zerodrift: error: ")
    assert "Traceback" not in done.stderr
    return done.stderr


# --- plan -------------------------------------------------------------------------------------------


def test_a_plan_is_one_as_text_as_json_and_as_a_page(files: Files, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = run("plan", *files, "--world-size", "8", "--html", str(page), FORCE_COLOR="1")
    assert done.returncode == 0 and done.stderr == f"zerodrift: wrote {page}\n"
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout and max(map(len, lines)) <= 100
    assert any(f"model.layers.*.mlp.experts.*.up_proj.weight x{LAYERS * EXPERTS} " in line for line in lines)
    assert any(line.startswith(" * model.layers.*.mlp.router.weight x4 ") for line in lines)
    assert "zero_optimization.overlap_comm" in done.stdout and "shard 8 (8 ranks)" in done.stdout
    data = json.loads(ok("plan", *files, "--world-size", "8", "--json"))
    plan = Plan.from_json(data)
    assert {row.name for row in plan.rows} == set(shapes()) and plan.mesh.shard == 8
    assert data["cost"]["micro_batches"] == 4 and data["cost"]["totals"]["wire"] > 0
    text = page.read_text()
    read_page(text)
    assert "http://" not in text and "https://" not in text
    assert plan.digest == data["digest"] and plan.digest in text and plan.digest[:12] in lines[0]


def test_keys_of_the_command_line_hold(files: Files) -> None:
    """One instead of the file's, and a number for one that is `auto` and is refused without."""
    keys = ("--set", "zero_optimization.stage=1", "--set", "train_micro_batch_size_per_gpu=auto")
    message = refusal("plan", *files, *keys)
    assert "train_micro_batch_size_per_gpu" in message and "--auto" in message
    text = ok("plan", *files, *keys, "--auto", "train_micro_batch_size_per_gpu=2")
    assert "1: master and state sharded" in text and "2 x 4 micro-batches x 1 rank = 8" in text


def test_rows_shows_only_what_matches_one_by_one(files: Files) -> None:
    routers = [f"model.layers.{layer}.mlp.router.weight" for layer in range(LAYERS)]
    text = ok("plan", *files, "--world-size", "8", "--rows", "*.router.*")
    assert all(name in text for name in routers)
    assert "up_proj" not in text and f"shown  {LAYERS} of " in text


# --- refusals ---------------------------------------------------------------------------------------

MISTAKES = {
    "plan CONFIG --model MODEL --set zero_optimization.stagee=2": "zero_optimization.stage",
    "plan CONFIG --model MODEL --set a": "`--set`: must be `dotted.path=value`",
    "plan CONFIG --model MODEL --rows *.ruoter.*": "`*.router.*`",
    "explain CONFIG --model MODEL model.layers.2.mlp.ruoter.weight": "`model.layers.2.mlp.router.weight`",
    "check --expect nope.json -- no-such-program": "`nope.json`: must exist",
}
"""A command -> what its error must name."""


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named(command: str, files: Files) -> None:
    there = {"CONFIG": files[0], "MODEL": files[2]}
    assert MISTAKES[command] in refusal(*(there.get(word, word) for word in command.split()))


# --- explain ----------------------------------------------------------------------------


def test_explain_says_why(files: Files) -> None:
    name = "model.layers.2.mlp.router.weight"
    text = ok("explain", *files, name, "--world-size", "2")
    assert f"{name} (pinned)" in text
    assert "precision.rules[0]: '*.router.weight'" in text
    assert max(map(len, text.splitlines())) <= 100
    data = json.loads(ok("explain", *files, name, "--world-size", "2", "--json"))["parameter"]
    assert [cell["column"] for cell in data["cells"]] == list(COLUMNS)
    assert sum(part["stop"] - part["start"] for part in data["slices"]) == EXPERTS * WIDTH


# --- plan --trace -----------------------------------------------------------------------------------

CODE = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.router = nn.Linear(8, 2, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.router(x)


def net():
    return Net()


def inputs():
    return {"x": torch.zeros(2, 8)}
"""
INPUTS = ("--model", "nets_to_trace:net", "--inputs", "nets_to_trace:inputs")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with models and a config, change to it, and return the config."""
    (tmp_path / "nets_to_trace.py").write_text(CODE)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("*.router", "router"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config.yaml"


def test_a_trace_is_a_page_of_80_columns_and_its_json_has_the_same_lines(code: Path) -> None:
    text = ok("plan", code, "--trace", *INPUTS, FORCE_COLOR="1", COLUMNS="80")
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    assert "layers.* x3         bf16          addmm, < mm, sum" in text
    assert "bf16 -> fp32  cast by a boundary" in text
    assert "findings   none" in text
    data = json.loads(ok("plan", code, "--trace", *INPUTS, "--json"))
    assert data["findings"] == [] and data["refused"] is None
    modules = {line["module"]: line for line in data["trace"]}
    assert modules["layers.*"]["modules"] == ["layers.0", "layers.1", "layers.2"]
    first, *rest = modules["router"]["forward"]
    assert (first["name"], first["inputs"], first["outputs"]) == ("_to_copy", ["bf16"], ["fp32"])
    assert first["cast_by"] == "a boundary" and first["line"] == "nets_to_trace.py:14"
    assert [(each["name"], each["inputs"]) for each in rest] == [("mm", ["fp32", "fp32"])]


# --- plan --simulate --------------------------------------------------------------------------------


def test_a_simulation_is_a_page_of_80_columns_and_adds_up(code: Path) -> None:
    shutil.copy(CLUSTERS / "h100.yaml", "mine.yaml")
    simulated = ("plan", code, *INPUTS, "--world-size", "64", "--simulate")
    done = run(*simulated, "h100", FORCE_COLOR="1", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    assert "step   simulated, not measured" in done.stdout and "it fits" in done.stdout
    assert re.search(r"zerodrift: cluster h100 is .*clusters.h100\.yaml", done.stderr)
    data = json.loads(ok(*simulated, "mine.yaml", "--json"))
    assert data["seconds"] == pytest.approx(data["computed"] + data["exposed"])
    assert data["memory"]["fits"] and data["ranks"] == 64 and data["micro_batches"] == 4
    assert "one of a100, h100, h200; got 'h1000'" in refusal(*simulated, "h1000")
    told = refusal("plan", code, *INPUTS[:2], "--simulate", "h100")
    assert "`--tokens`: must be the number of tokens of a sample" in told
