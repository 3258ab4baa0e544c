"""`run.profile`: traces of some steps, of a run that computes what it would without."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.jobs import job, kinds, losses, on_a_rank, trained
from tests.ranks.harness import run_ranks
from zerodrift.errors import ZerodriftError
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.loop.start import train

pytestmark = pytest.mark.usefixtures("at_the_root")


def traced(folder: Path) -> dict[str, list[str]]:
    """File -> the steps in it, by their names."""
    found = {}
    for file in sorted((folder / "run" / "traces").iterdir()):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        found[file.name] = sorted({e["name"] for e in events if e.get("name", "").startswith("step ")})
    return found


def test_each_rank_has_a_trace_and_the_bits_are_the_same(tmp_path: Path) -> None:
    found = []
    for number, more in enumerate(([], ["run.profile={from: 2, steps: 2}"])):
        folder = tmp_path / str(number)
        config = {"scheduler": {"type": "linear", "params": {"num_training_steps": "auto"}}}
        run_ranks(on_a_rank, 2, str(job(folder, steps=4, config=config)), more)
        found.append([(line["loss"], line["lr"]) for line in kinds(folder, "step")])
    assert found[0] == found[1] and len({loss for loss, _ in found[0]}) == 4
    assert [rate for _, rate in found[0]] == [1e-2 * left for left in (1.0, 0.75, 0.5, 0.25)]
    names = [f"steps-00000002-00000003-rank-{rank}.json.gz" for rank in range(2)]
    assert traced(folder) == {name: ["step 2", "step 3"] for name in names}
    page = (folder / "run" / "report.html").read_text()
    assert "steps 2 to 3" in page and str(folder / "run" / "traces") in page
    assert RunFolder(folder / "run").load_job().run.profile is not None


def test_a_span_across_a_resume_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(job(tmp_path, steps=2))
    train(path, ["run.profile={from: 2, steps: 1}"])
    assert "trace of step 2, a file for each rank: " in capsys.readouterr().out
    train(path, ["run.steps=4", "run.profile={from: 2, steps: 2}"])
    out = capsys.readouterr().out
    assert "run.profile.steps: was 1, is 2" in out
    assert traced(tmp_path)["steps-00000003-00000003-rank-0.json.gz"] == ["step 3"]
    shutil.rmtree(tmp_path / "run" / "traces")
    train(path, ["run.steps=5", "run.profile={from: 2, steps: 2}"])
    assert "steps 2 to 3 are over and are not recorded (`run.profile`)" in capsys.readouterr().out
    assert len(losses(tmp_path)) == 5


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("{from: 5, steps: 3}", "`run.profile`: must lie within the 6 steps of the run; got steps 5 to 7"),
        ("{from: 0}", "`run.profile.from`: must be a whole number above 0"),
        ("{steps: 2}", "`run.profile.from`: must be given"),
        ("{from: 1, steps: -1}", "`run.profile.steps`: must be a whole number above 0"),
        ("{form: 1}", "`run.profile.form`"),
    ],
)
def test_what_is_no_span_of_the_run_is_refused(tmp_path: Path, profile: str, words: str) -> None:
    with pytest.raises(ZerodriftError, match=re.escape(words)):
        trained(tmp_path, overrides=[f"run.profile={profile}"])
