"""Five scripts under zerodrift and, where it is installed, under DeepSpeed: only the import changes.

What is compared, and how far apart it may be:

- plain, accumulation, resume: fp32. Losses, norms, weights to 1e-6: sums are formed in another order, and
  DeepSpeed divides by micro-batches before each backward, this once after the sum. Rates, counts, flags, the
  client state, tags, `latest` and the names of weights: equal.
- zero3: fp32, one micro-batch. 1e-6 too, though on two ranks the bits are the same.
- scaling: fp16. The loss scale and the skipped steps are equal; losses to 1e-3, because masters start from
  the model's bits here and from fp16-rounded ones there.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.dropin.script import CLOSE, apart
from tests.e2e.launching import forked, torchrun
from tests.e2e.run_scripts import SCRIPTS, source

RUNNER = Path(__file__).parent / "run_scripts.py"
NAMES = ("plain", "accumulation", "scaling", "zero3", "resume")
TOLERANCE = {"scaling": 1e-3}

pytestmark = pytest.mark.timeout(800)

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def told(package: str) -> dict[str, Any]:
    """What the scripts tell under a package: all are one start of two ranks."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as folder:
        if package == "zerodrift":
            forked(RUNNER, [package, folder, *NAMES], Path(folder))
        else:  # it compiles first, for a minute or, where much else runs, some more
            torchrun(RUNNER, [package, folder, *NAMES], Path(folder), 500.0)
        found = {name: json.loads((Path(folder) / f"{name}.json").read_text()) for name in NAMES}
        found["files"] = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
        return found


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return told("zerodrift")


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    return told("deepspeed")


@needs_deepspeed
@pytest.mark.parametrize("name", NAMES)
def test_a_script_does_the_same_under_both(name: str, ours: Any, theirs: Any) -> None:
    assert not apart(ours[name], theirs[name], name, TOLERANCE.get(name, CLOSE))


@needs_deepspeed
def test_the_files_that_are_promised_are_there_under_both(ours: Any, theirs: Any) -> None:
    mine = set(ours["files"])
    assert mine == {"latest", "global_step5", "chosen", "weights.bin", "zero_to_fp32.py"}
    assert {*theirs["files"]} - {
        "zero_to_torch.py"
    } == mine  # which 0.19.7 and 0.19.8 write, and docs/migrating.md names


def test_only_the_import_changes() -> None:
    for name in NAMES:
        mine, theirs = source(name, "zerodrift").splitlines(), source(name, "deepspeed").splitlines()
        changed = [(a, b) for a, b in zip(mine, theirs, strict=True) if a != b]
        assert changed and all("import" in b for _, b in changed), name
        assert (SCRIPTS / f"{name}.py").read_text() == source(name, "deepspeed")


def test_the_comparison_can_fail() -> None:
    assert apart({"a": [1.0, 2.0]}, {"a": [1.0, 2.001]}, "x") == ["x a[1]: 2.0 for 2.001"]
    assert apart({"a": True}, {"a": False}, "x", 1.0)
    assert not apart({"a": [1.0, "s", 3]}, {"a": [1.0 + 1e-9, "s", 3]}, "x")


def test_plain_trains_and_follows_its_schedule(ours: dict[str, Any]) -> None:
    run = ours["plain"]
    assert sum(run["losses"][-3:]) < sum(run["losses"][:3])
    assert run["rates"][0] == 0.0 and run["rates"][-1] == run["group_lr"] == pytest.approx(1e-2)
    assert run["steps"] == 2 * run["batches"] and run["samples"] == 8 * run["steps"]
    assert run["local_rank"] == 0


def test_boundaries_are_the_scripts_own(ours: dict[str, Any]) -> None:
    run = ours["accumulation"]
    assert run["boundaries"] == [False, False, False, True] * 6
    assert run["steps"] == 6 and run["train_batch_size"] == 16


def test_the_scale_falls_until_gradients_are_finite_and_rises_again(ours: dict[str, Any]) -> None:
    run = ours["scaling"]
    scales = [2.0**24, *run["scales"]]
    for before, after, overflow in zip(scales, run["scales"], run["overflows"], strict=False):
        assert after == before / 2 if overflow else after in (before, 2 * before)
    assert run["overflows"][0] and not all(run["overflows"])
    assert run["skipped"][-1] == sum(run["overflows"])
    assert run["steps"] == len(run["losses"])


def test_zero3_shows_full_values(ours: dict[str, Any]) -> None:
    run = ours["zero3"]
    assert run["shape"] == [48, 24]
    assert run["losses"][-1] < run["losses"][0]
    assert len(run["visible"]) == 22


def test_a_resumed_run_is_the_run_that_went_on(ours: dict[str, Any]) -> None:
    run = ours["resume"]
    assert run["resumed"] == run["after"]
    assert run["client"] == {"epoch": 3, "seen": [1, 2, 3]}
    assert run["nothing"] == [None, None] and run["steps"] == 9
    assert run["latest"] == "global_step5" and run["folders"] == ["chosen", "global_step5"]
    assert run["weights"] == run["masters"]
