"""The commands of the tutorial, the recipes and the page of checkpoints run in their order, with their jobs.

Steps and blocks are few, and models are tiny, where the pages name a real one too.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests import commands
from tests.unit.letters import byte_tokenizer
from zerodrift.cli import app
from zerodrift.train.report.metrics import read

transformers = pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

ROOT = Path(__file__).parents[2]
CHECKPOINTS = (ROOT / "docs" / "checkpoints.md").read_text()
ELSEWHERE = ("pip install", "hf download")
"""Commands that need a network, or change the environment."""

FEW = ("--set", "run.steps=2", "--set", "data.block=64")


def sections(page: str) -> list[list[tuple[str, str]]]:
    """Return (language, text) of the blocks that a reader copies, by the headings of a page."""
    text = (ROOT / "docs" / page).read_text()
    return [re.findall(r"^```(yaml|bash)\n(.*?)^```", part, re.M | re.S) for part in text.split("\n## ")]


def named(text: str) -> str:
    """Return the page's name for a job."""
    return text.split()[1]


RECIPES = {
    named(text): section
    for section in sections("recipes.md")
    for language, text in section
    if language == "yaml" and "\nmodel:\n" in text
}
OF_TRL = next(section for section in sections("recipes.md") if any("-- trl" in text for _, text in section))


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the files that the pages require of a reader."""
    folder: Path = tmp_path_factory.mktemp("reader")
    (folder / "text").mkdir()
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(f"Note {number}: the plan decides. " * 60)
    rows = [{"text": f"Row {number} says what it says. " * 8} for number in range(60)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("".join(lines[:50]).encode()))
    (folder / "held-out.jsonl").write_text("".join(lines[50:]))
    said = {"role": "assistant", "content": "Yes."}
    talks = [{"messages": [{"role": "user", "content": f"{n}?"}, said]} for n in range(40)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads))
    model.save_pretrained(folder / "Qwen3-0.6B")
    byte_tokenizer(folder / "Qwen3-0.6B")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def follow(section: list[tuple[str, str]], folder: Path) -> list[str]:
    """Write the jobs, run the commands, and return these."""
    ran = []
    for language, text in section:
        if language == "yaml":
            (folder / named(text)).write_text(text)
            continue
        for line in text.splitlines():
            if not line.startswith(ELSEWHERE):
                program, verb, *rest = shlex.split(line)
                assert program == "zerodrift", line
                few = FEW if verb in ("train", "data", "evaluate") else ()
                assert not app([verb, *rest, *few], standalone_mode=False), line
                ran.append(line)
    return ran


SHORTER = {
    "train": ["--set", "run.steps=4", "--set", "run.digest_every=1", "--set", "run.checkpoint_every=2"],
    "replay": ["--from", "2", "--to", "4"],
}
"""Verb -> arguments that make a command of the tutorial cheap."""


def test_the_tutorial_is_followed(tmp_path: Path) -> None:
    """The notebook's commands run, but `check` and `audit`, which take long."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    cells = json.loads((ROOT / "examples/start.ipynb").read_text())["cells"]
    lines = [
        line for cell in cells for line in "".join(cell["source"]).splitlines() if line.startswith("!zero")
    ]
    told = ""
    for line in lines:
        program, verb, *rest = shlex.split(line[1:])
        assert program == "zerodrift", line
        if verb not in ("check", "audit"):
            done = commands.run(verb, *rest, *SHORTER.get(verb, []), folder=tmp_path)
            assert done.returncode == 0, line + done.stderr
            told += done.stdout
    assert "the same bits in 2 recorded steps, on 1 rank, where 2 recorded them" in told
    assert "master same/" in told and "model.layers.*.mlp.gate.weight x4" in told
    assert (tmp_path / "runs/lab/report.html").is_file()
    assert list((tmp_path / "runs/lab/export").glob("*.safetensors"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_followed(
    name: str, materials: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if name == "lora.yaml":
        pytest.importorskip("peft", reason="needs the extra `peft`")
    monkeypatch.chdir(materials)
    ran = follow(RECIPES[name], materials)
    assert any(line.startswith(f"zerodrift train {name}") for line in ran)
    run = materials / "runs" / Path(name).stem
    losses = [line["loss"] for line in read(run / "metrics.jsonl") if line["kind"] == "step"]
    assert len(losses) == 2, capfd.readouterr().out


def test_what_the_recipes_say_without_a_job_is_followed(
    materials: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(materials)
    (materials / "pretrain.yaml").write_text(next(text for _, text in RECIPES["pretrain.yaml"]))
    others = [part for part in sections("recipes.md") if part not in (*RECIPES.values(), OF_TRL)]
    assert [line for section in others for line in follow(section, materials)]
    assert "512 ranks" in capfd.readouterr().out


# --- the page of checkpoints --------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", CHECKPOINTS, flags=re.MULTILINE | re.DOTALL)


def test_the_page_of_checkpoints_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python runs from top to bottom, then its commands."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    code = blocks("python")
    assert len(code) == 3
    for number, text in enumerate(code):
        exec(compile(text, f"block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "loaded runs/first/step-00000004, step 4" in printed
    assert "`optimizer`: must be adamw, as when it was saved; got lion." in printed
    kept = sorted(path.name for path in (tmp_path / "runs" / "first").iterdir())
    assert kept == ["latest", "step-00000004", "step-00000005", "step-00000006"]
    listed = set(re.findall(r"^ +(?:runs/first/step-00000006)?/([\w.-]+)  ", CHECKPOINTS, flags=re.MULTILINE))
    found = {path.name for path in (tmp_path / "runs" / "first" / "step-00000006").iterdir()}
    assert listed == found, "the page lists the files that there are"
    lines = blocks("sh")[0].splitlines()
    assert len(lines) == 3
    for command in lines:
        program, *words = shlex.split(command)
        done = commands.run(*words)
        assert program == "zerodrift"
        assert done.returncode == 0 and "step-00000006" in done.stdout, done.stderr
