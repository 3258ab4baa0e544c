"""A user's first steps: examples and pages in the package, and what the doctor finds on a machine."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path
from typing import Any

import pytest

from zerodrift.cli import app, machine
from zerodrift.errors import ZerodriftError
from zerodrift.train.job_file import read_job
from zerodrift.train.tools import doctor

ROOT = Path(__file__).parents[2]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app([*arguments], standalone_mode=False)
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is new in 3.11")
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text()))


def test_the_package_has_the_examples_the_pages_and_the_extras_that_the_doctor_names(
    pyproject: dict[str, Any],
) -> None:
    """A build follows a link to the folders at the top, and the globs hold every file of them."""
    assert machine.EXAMPLES.resolve() == ROOT / "examples" and machine.DOCS.resolve() == ROOT / "docs"
    globs = pyproject["tool"]["setuptools"]["package-data"]["zerodrift"]
    for folder in ("docs", "examples"):
        for path in (ROOT / folder).rglob("*"):
            place = Path(folder) / path.relative_to(ROOT / folder)
            if path.is_file() and path.suffix not in (".pyc", ".py") and path.name[0] != ".":
                assert any(place.match(glob) for glob in globs), place
    extras = pyproject["project"]["optional-dependencies"]
    for package, extra in doctor.EXTRAS.items():
        assert not extra or any(re.match(rf"{package}\b", each) for each in extras[extra]), package


def test_examples_are_listed_and_copied_with_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "jobs/lora.yaml\n    Adapters through `peft`" in printed(capsys, "examples")
    assert "zerodrift train examples/jobs/lab.yaml" in printed(capsys, "examples", "--copy")
    assert Path("examples/jobs/lab.yaml").read_bytes() == (ROOT / "examples/jobs/lab.yaml").read_bytes()
    printed(capsys, "examples", "--copy", "mine")
    for path in Path("mine/jobs").glob("*.yaml"):
        job, _ = read_job(path)
        assert Path(job.model.source).is_dir() or job.model.source == "mine.jobs.own_model:build", path
        assert glob.glob(str(job.data.train)) and not str(job.data.train).startswith("examples"), path
    assert "examples/" not in Path("mine/start.ipynb").read_text()
    with pytest.raises(ZerodriftError, match="must be an empty folder, or not exist"):
        machine._copy(Path("mine"))


def test_the_doctor_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "doctor")
    for word in ("zerodrift", "torch", "tested: ", "bf16 products", "gloo", "C++ compiler"):
        assert word in text, word
    found = json.loads(printed(capsys, "doctor", "--json"))
    assert {finding["part"] for finding in found} == {"versions", "CPU", "GPU", "ranks", "kernels"}


def test_the_doctor_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    monkeypatch.setattr(doctor.native, "library", lambda: None)
    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0" if name == "torch" else "")
    monkeypatch.setattr(doctor, "_seconds", lambda dtype: 4.0 if dtype is doctor.torch.bfloat16 else 1.0)
    found = doctor.examine({})
    wrong = {finding.what for finding in found if finding.bad}
    assert wrong >= {"torch", "bf16 products", "C++ compiler", "CPU updates"}
    text = doctor.doctor_text(found, color=False, width=60)
    assert "slow or missing" in text and "mode: fp32" in " ".join(text.split()) and "[hf]" in text
    assert max(map(len, text.splitlines())) <= 60
