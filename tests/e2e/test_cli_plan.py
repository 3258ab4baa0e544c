"""`plan`, `explain` and `support` as a person runs them: a process, files, pipes, exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import zerodrift
from tests.commands import run
from tests.unit.test_report_page import read as read_page
from zerodrift.plan.table import Plan
from zerodrift.policy.decisions import COLUMNS

LAYERS, EXPERTS, WIDTH = 4, 4, 32

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


@dataclass(frozen=True)
class Files:
    """A config and a model on disk."""

    config: Path
    model: Path

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((str(self.config), "--model", str(self.model)))


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


def safetensors(path: Path) -> Path:
    """Write a file of zeros in bf16: a header with names, shapes and places, then the bytes."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes().items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("plan")
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    return Files(config, safetensors(folder / "model.safetensors"))


def ok(*arguments: str, **environment: str) -> str:
    done = run(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def refusal(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert done.stderr.startswith("zerodrift: error: ")
    assert "Traceback" not in done.stderr
    return done.stderr


# --- plan -------------------------------------------------------------------------------------------


def test_the_plan_is_a_page_of_plain_text(files: Files) -> None:
    text = ok("plan", *files, "--world-size", "8", FORCE_COLOR="1")
    lines = text.splitlines()
    assert "\x1b" not in text
    assert max(map(len, lines)) <= 100
    assert any(f"model.layers.*.mlp.experts.*.up_proj.weight x{LAYERS * EXPERTS} " in line for line in lines)
    assert any(line.startswith(" * model.layers.*.mlp.router.weight x4 ") for line in lines)
    assert "zero_optimization.overlap_comm" in text
    assert "shard 8 (8 ranks)" in text


def test_json_is_the_plan(files: Files) -> None:
    data = json.loads(ok("plan", *files, "--world-size", "8", "--json"))
    plan = Plan.from_json(data)
    assert plan.digest == data["digest"]
    assert {row.name for row in plan.rows} == set(shapes())
    assert plan.mesh.shard == 8
    assert data["cost"]["micro_batches"] == 4
    assert data["cost"]["totals"]["wire"] > 0


def test_the_digest_is_the_same_in_every_form(files: Files) -> None:
    digest = json.loads(ok("plan", *files, "--json"))["digest"]
    assert digest[:12] in ok("plan", *files).splitlines()[0]
    assert digest[:12] in ok("explain", *files, "lm_head.weight").splitlines()[0]


def test_micro_batches_change_the_bill_and_not_the_plan(files: Files) -> None:
    few, many = (
        json.loads(ok("plan", *files, "--world-size", "2", "--micro-batches", count, "--json"))
        for count in ("1", "8")
    )
    assert few["digest"] == many["digest"]
    assert few["cost"]["totals"]["wire"] < many["cost"]["totals"]["wire"]


def test_set_overrides_the_file(files: Files) -> None:
    keys = ("--set", "zero_optimization.stage=1", "--set", "precision.state=bf16-stochastic")
    text = ok("plan", *files, "--world-size", "8", *keys)
    assert "1: master and state sharded" in text
    assert "bf16-stochastic/" in text


def test_auto_needs_a_number_and_takes_one(files: Files) -> None:
    auto = ("--set", "train_micro_batch_size_per_gpu=auto")
    message = refusal("plan", *files, *auto)
    assert "train_micro_batch_size_per_gpu" in message and "--auto" in message
    text = ok("plan", *files, *auto, "--auto", "train_micro_batch_size_per_gpu=2")
    assert "2 x 4 micro-batches x 1 rank = 8" in text


def test_rows_shows_only_what_matches_one_by_one(files: Files) -> None:
    text = ok("plan", *files, "--world-size", "8", "--rows", "*.router.*")
    for layer in range(LAYERS):
        assert f"model.layers.{layer}.mlp.router.weight" in text
    assert "up_proj" not in text and f"shown  {LAYERS} of " in text
    data = json.loads(ok("plan", *files, "--rows", "*.router.*", "--json"))
    assert [item["names"] for item in data["parameters"]] == [
        [f"model.layers.{layer}.mlp.router.weight"] for layer in range(LAYERS)
    ]


def test_html_is_written_beside_the_text(files: Files, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = run("plan", *files, "--world-size", "8", "--html", str(page))
    assert done.returncode == 0
    assert done.stderr == f"zerodrift: wrote {page}\n"
    text = page.read_text()
    read_page(text)
    assert "http://" not in text and "https://" not in text
    digest = json.loads(ok("plan", *files, "--world-size", "8", "--json"))["digest"]
    assert digest in text and digest[:12] in done.stdout


def test_plans_do_not_import_torch(files: Files) -> None:
    code = (
        "import sys\n"
        "from zerodrift.cli import app\n"
        f"app({['plan', *files]!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "no-such.yaml", "--model", "MODEL"), "no-such.yaml"),
        (("plan", "CONFIG", "--model", "no-such-model"), "no-such-model"),
        (
            ("plan", "CONFIG", "--model", "MODEL", "--set", "zero_optimization.stagee=2"),
            "zero_optimization.stage",
        ),
        (("plan", "CONFIG", "--model", "MODEL", "--set", "a"), "`--set`: must be `dotted.path=value`"),
        (("plan", "CONFIG", "--model", "MODEL", "--rows", "*.ruoter.*"), "`*.router.*`"),
        (("plan", "CONFIG", "--model", "MODEL", "--html", "missing/plan.html"), "No such file or directory"),
        (("plan", "CONFIG", "--model", "MODEL", "--html", "."), "`--html`"),
        (
            ("explain", "CONFIG", "--model", "MODEL", "model.layers.2.mlp.ruoter.weight"),
            "`model.layers.2.mlp.router.weight`",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_named(arguments: tuple[str, ...], words: str, files: Files) -> None:
    there = {"CONFIG": str(files.config), "MODEL": str(files.model)}
    assert words in refusal(*(there.get(word, word) for word in arguments))


def test_an_interrupt_exits_130_and_says_nothing(files: Files, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text("def model():\n    raise KeyboardInterrupt\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "zerodrift", "plan", str(files.config), "--model", "interrupted:model"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_config_that_run_takes_is_planned(files: Files, tmp_path: Path) -> None:
    """Hjson, and classes of torch that only the drop-in makes: their keys are listed with that reason."""
    pytest.importorskip("hjson")
    config = tmp_path / "ds.json"
    text = """{
      // the optimizer is torch's
      "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}
      "scheduler": {"type": "StepLR", "params": {"step_size": 2}},
    }"""
    config.write_text(text)
    shown = ok("plan", str(config), "--model", str(files.model))
    told = " ".join(shown.split())
    assert all(
        f"`{kind}` is torch's: `zerodrift run` makes and steps it" in told for kind in ("Adagrad", "StepLR")
    )
    assert "planned for one with two moments (AdamW)" in shown
    config.write_text(text.replace("Adagrad", "Adagard").replace("StepLR", "StpLR"))
    message = refusal("plan", str(config), "--model", str(files.model))
    assert "or a class of torch.optim; got 'Adagard'. Did you mean `Adagrad`" in message
    assert "or a class of torch.optim.lr_scheduler; got 'StpLR'. Did you mean `StepLR`" in message
    done = run("check", "--expect", "nope.json", "--", "no-such-program")
    assert done.returncode == 2 and "`nope.json`: must exist" in done.stderr, "before the command is run"
    assert "`nope.json`: must exist" in refusal("diff", "nope.json", str(config))


# --- explain ----------------------------------------------------------------------------------------


def test_explain_says_why(files: Files) -> None:
    name = "model.layers.2.mlp.router.weight"
    text = ok("explain", *files, name, "--world-size", "2")
    assert f"{name} (pinned)" in text
    assert "precision.rules[0]: '*.router.weight'" in text
    assert max(map(len, text.splitlines())) <= 100
    data = json.loads(ok("explain", *files, name, "--world-size", "2", "--json"))["parameter"]
    assert [cell["column"] for cell in data["cells"]] == list(COLUMNS)
    assert sum(part["stop"] - part["start"] for part in data["slices"]) == EXPERTS * WIDTH


# --- support ----------------------------------------------------------------------------------------


def test_support_in_three_forms() -> None:
    cells = json.loads(ok("support", "--json"))["cells"]
    assert {cell["status"] for cell in cells} == {"yes", "narrow", "no"}
    assert max(map(len, ok("support").splitlines())) <= 100
    assert ok("support", "--markdown").startswith("# What is supported?\n")


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


class Looks(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def looks():
    return Looks()
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    (tmp_path / "nets_to_trace.py").write_text(CODE)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("*.router", "router"))
    monkeypatch.chdir(tmp_path)
    return ("config.yaml", "--trace", "--model")


def test_a_trace_is_a_page_of_80_columns(code: tuple[str, ...]) -> None:
    text = ok(
        "plan", *code, "nets_to_trace:net", "--inputs", "nets_to_trace:inputs", FORCE_COLOR="1", COLUMNS="80"
    )
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    assert "layers.* x3         bf16          addmm, < mm, sum" in text
    assert "bf16 -> fp32  cast by a boundary" in text
    assert "findings   none" in text


def test_a_trace_as_json_has_the_same_lines(code: tuple[str, ...]) -> None:
    data = json.loads(ok("plan", *code, "nets_to_trace:net", "--inputs", "nets_to_trace:inputs", "--json"))
    assert data["findings"] == [] and data["refused"] is None
    modules = {line["module"]: line for line in data["trace"]}
    assert modules["layers.*"]["modules"] == ["layers.0", "layers.1", "layers.2"]
    first, *rest = modules["router"]["forward"]
    assert (first["name"], first["inputs"], first["outputs"]) == ("_to_copy", ["bf16"], ["fp32"])
    assert first["cast_by"] == "a boundary" and first["line"] == "nets_to_trace.py:14"
    assert [(each["name"], each["inputs"]) for each in rest] == [("mm", ["fp32", "fp32"])]


def test_what_cannot_be_traced_is_one_message(code: tuple[str, ...], files: Files) -> None:
    assert "must have example inputs to be traced; got `forward(x)`" in refusal(
        "plan", *code, "nets_to_trace:net"
    )
    given = ("--inputs", "nets_to_trace:inputs")
    told = refusal("plan", *code, "nets_to_trace:looks", *given)
    assert told.startswith("zerodrift: error: `model (Looks)`: must not let values decide what runs")
    line = next(number for number, text in enumerate(CODE.splitlines(), 1) if "x.sum()" in text)
    assert f"nets_to_trace.py:{line}." in told
    assert "which hold tensors only" in refusal("plan", *files, "--trace")


def test_options_that_do_not_go_with_it_are_usage_errors(files: Files) -> None:
    together = (
        ("--trace", "--rows", "*"),
        ("--inputs", "a:b"),
        ("--sweep",),
        ("--simulate", "h100", "--trace"),
        ("--simulate", "h100", "--inputs", "a:b", "--tokens", "8"),
    )
    for options in together:
        done = run("plan", *files, *options)
        assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""


# --- plan --simulate --------------------------------------------------------------------------------


@pytest.fixture
def simulated(code: tuple[str, ...]) -> tuple[str, ...]:
    config, _, model = code
    shutil.copy(
        Path(zerodrift.__file__).parent / "inspect" / "simulate" / "clusters" / "h100.yaml", "mine.yaml"
    )
    return (config, model, "nets_to_trace:net", "--inputs", "nets_to_trace:inputs", "--world-size", "64")


def test_a_simulation_is_a_page_of_80_columns(simulated: tuple[str, ...]) -> None:
    done = run("plan", *simulated, "--simulate", "h100", FORCE_COLOR="1", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    assert "step   simulated, not measured" in done.stdout and "it fits" in done.stdout
    assert re.search(r"zerodrift: cluster h100 is .*clusters.h100\.yaml", done.stderr)


def test_a_simulation_as_json_adds_up(simulated: tuple[str, ...]) -> None:
    data = json.loads(ok("plan", *simulated, "--simulate", "mine.yaml", "--json"))
    assert data["seconds"] == pytest.approx(data["computed"] + data["exposed"])
    assert data["memory"]["fits"] and data["ranks"] == 64 and data["micro_batches"] == 4


def test_a_sweep_ranks_ways_and_tells_what_is_refused(simulated: tuple[str, ...]) -> None:
    text = ok("plan", *simulated, "--simulate", "mine.yaml", "--sweep", COLUMNS="80")
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("fits   simulated") < text.index("stage") < text.index("refused")
    data = json.loads(ok("plan", *simulated, "--simulate", "mine.yaml", "--sweep", "--json"))
    times = [way["seconds"] for way in data["fit"]]
    assert times == sorted(times) and {way["stage"] for way in data["fit"]} == {0, 1, 2, 3}


def test_what_cannot_be_simulated_is_one_message(code: tuple[str, ...], simulated: tuple[str, ...]) -> None:
    assert "one of a100, h100, h200; got 'h1000'" in refusal("plan", *simulated, "--simulate", "h1000")
    config, _, model = code
    told = refusal("plan", config, model, "nets_to_trace:net", "--simulate", "h100")
    assert "`--tokens`: must say how many tokens a sample has" in told
