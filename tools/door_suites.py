"""Run other people's tests on zerodrift and on DeepSpeed, for the third table of docs/doors.md.

`tools/doors.py suite FOLDER NAME CHECKOUT` runs DeepSpeed's unit tests by the plugin
`tests/doors/deepspeed_suite.py`, those of accelerate and TRL by `tests/doors/hub_suite.py`, and calls this.

Invariant: a test that DeepSpeed itself fails on this machine counts neither way, where DeepSpeed was run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import processes
from environment import ROOT

RESULTS = ROOT / "tests" / "doors" / "suites.json"
PLUGINS = ROOT / "tests" / "doors"
LIMIT = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of a package that concern DeepSpeed's engine or its place in that package."""

    tool: str
    """Tool of `tests/doors/examples.py` whose environment runs the tests."""
    packages: tuple[str, ...]
    """Packages that the tests need beside that environment."""
    options: tuple[str, ...]
    files: tuple[str, ...]
    """Paths below `start`."""
    start: str = "."
    """The folder of a checkout that the tests are run from."""
    plugin: str = "hub_suite"

    def choose(self, checkout: Path, only: str) -> Suite:
        """Return the suite with those files of a checkout that have `only` in their paths."""
        if not only:
            return self
        start = checkout / self.start
        found = [path for name in self.files for path in _tests_below(start / name)]
        paths = (path.relative_to(start).as_posix() for path in found)
        return replace(self, files=tuple(path for path in paths if only in path))


def _tests_below(path: Path) -> list[Path]:
    """Return a file of tests, or those of a folder."""
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


_RUNTIME = (
    *("activation_checkpointing", "half_precision/test_dynamic_loss_scale.py", "half_precision/test_fp16.py"),
    *("half_precision/test_zero_optim_overflow.py", "test_autocast.py", "test_data.py"),
    *("test_ds_config_dict.py", "test_ds_config_model.py", "test_ds_initialize.py", "test_lr_schedulers.py"),
    *("test_multi_output_model.py", "test_multiple_models.py", "test_no_sync_ctxt.py", "test_pld.py"),
    *("test_precision_config_dynamic_scale.py", "test_precision_config_loss_scale.py"),
    *("test_runtime_utils.py", "utils", "zero"),
)
_CHECKPOINT = ("latest_checkpoint", "lr_scheduler", "other_optimizer", "shared_weights", "tag_validation",
               "zero_optimizer")  # fmt: skip

_ACCELERATE = ("", "_gradient_accumulation", "_multiple_model")

SUITES = {
    "DeepSpeed": Suite(
        "deepspeed",
        ("pytest", "pytest-timeout", "transformers", "accelerate"),
        ("--timeout", "200", "-W", "ignore"),
        (
            *(f"unit/runtime/{name}" for name in _RUNTIME),
            *("unit/v1/zero", "unit/v1/half_precision", "unit/utils", "unit/comm/test_dist.py"),
            *(f"unit/checkpoint/test_{name}.py" for name in _CHECKPOINT),
            *("unit/monitor", "unit/launcher"),
        ),
        "tests",
        "deepspeed_suite",
    ),
    "accelerate": Suite(
        "accelerate",
        ("pytest", "parameterized", "datasets"),
        (),
        tuple(f"tests/deepspeed/test_deepspeed{name}.py" for name in _ACCELERATE),
    ),
    "TRL": Suite(
        "trl",
        ("pytest", "pytest-datadir"),
        ("-k", "zero2 or zero3"),
        ("tests/distributed/test_distributed.py",),
    ),
}


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The result of one file of tests."""

    suite: str
    file: str
    there: int | None
    """How many tests pass on DeepSpeed; None where it was not run."""
    here: int
    """How many of these pass on zerodrift, or of all."""
    more: int
    """How many pass on zerodrift alone."""
    why: Mapping[str, int] = field(default_factory=dict)
    """Reason -> how many of DeepSpeed's passes, or of all tests, fail for it."""


def read(path: Path) -> dict[str, tuple[str, str]]:
    """Return test -> its outcome and reason; a file that cannot be collected is there by its own name."""
    found: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        told = json.loads(line)
        told["test"] = told["test"].removeprefix("unit/").removeprefix("tests/")
        if found.get(told["test"], ("", ""))[0] != "failed":
            found[told["test"]] = told["outcome"], told["why"]
    return found


Outcomes = Mapping[str, tuple[str, str]]
"""Test -> outcome and reason."""


def compare(suite: str, here: Outcomes, there: Outcomes) -> list[SuiteResult]:
    """Return a result for each file, from the outcomes on zerodrift and on DeepSpeed."""
    files: dict[str, list[str]] = {}
    for test in [*there, *here]:
        files.setdefault(test.partition("::")[0], []).append(test)
    rows = []
    for file, tests in sorted(files.items()):
        known = there or {test: ("passed", "") for test, told in here.items() if told[0] != "skipped"}
        good = {test for test in tests if known.get(test, ("", ""))[0] == "passed"}
        ours = {test for test in tests if here.get(test, ("", ""))[0] == "passed"}
        uncollected = here.get(file, ("", ""))[1]
        missing = ("failed", uncollected or "did not run")
        why = dict(Counter(reason(here.get(test, missing)) for test in sorted(good - ours)).most_common())
        passes = len(good) if there else None
        rows.append(SuiteResult(suite, file, passes, len(good & ours), len(ours - good), why))
    return rows


def reason(told: tuple[str, str]) -> str:
    """Return why a test failed, short, and without what differs between tests of one cause."""
    outcome, why = told
    if outcome == "skipped":
        return f"skipped: {why[:80]}"
    for pattern, meaning in MEANINGS.items():
        if found := re.search(pattern, why):
            return found.expand(meaning)
    if found := _MISSING.search(why):
        name = next(filter(None, found.groups()))
        private = any(part.startswith("_") for part in name.split("."))
        return f"asks for the private `{name}`" if private else f"no `{name}`"
    short = why.removeprefix("Failed: ")
    for end in (" Traceback (", "; got ", " + where ", " where ", "\\n"):
        short = short.partition(end)[0]
    return re.sub(r"\b(bf16|fp16|fp32)\b", "DTYPE", re.sub(r"0x[0-9a-f]+|\b\d+(\.\d+)?\b", "#", short))[:120]


MEANINGS = {
    r"DID NOT RAISE (?:<class ')?(\w+)": r"works here, where DeepSpeed raises \1",
    "requires_grad=False is not supported": "works here, where DeepSpeed raises RuntimeError",
    "It is illegal to call Engine.step|reentry is unsupported": "the same refusal, in other words",
    "must be a supported `accumulate` in mode": (
        "gradients are summed in a dtype that cannot hold them, refused on purpose"
    ),
    "`reduce` must not be fp16 in mode bf16": "bf16 gradients are sent in fp16, refused on purpose",
    "`backward`: the loss must be scaled": (
        "a loss that is not scaled in fp16, which DeepSpeed refuses too in calls of its engine"
    ),
    r"isinstance\(DeepSpeedOptimizer.*(FusedAdam|FP16_UnfusedOptimizer)\)": (
        r"asks for DeepSpeed's own class of optimizer, `\1`"
    ),
    "should go back to be 0-sized": "a parameter without values keeps its shape here",
    "partitioned_param_data_shape|'Placeholder' object is not iterable": (
        "a parameter without values keeps its shape here"
    ),
    "hooks_exist|pre_bwd_fn": "looks for hooks of stage 3, of which there are none here",
    "ZeroParamStatus.NOT_AVAILABLE": (
        "in a forward `ds_status` still says not available, though the values are there"
    ),
    "Expected in-place modification error": "a write that changes no value is no error here",
    "has no attribute .ds_tensor.": "looks into a module before `zero.Init` ends, which shards it then",
    "`model`: must be a torch.nn.Module": "the same refusal, in other words",
    "`config_utils.|runtime.precision_config|runtime.config.|DeepSpeedConfigModel|DeepSpeedZeroConfig": (
        "asks for DeepSpeed's classes of configs"
    ),
    "must be in a module that the engine was given": (
        "a module that is attached after `initialize` is refused by name"
    ),
    r"ordered_dict|OrderedDict|isinstance\(\{'weight'": "asks for DeepSpeed's own dict of parameters",
    "LinearModuleFor|autocast_custom_fwd|zero3_linear_wrap|has no attribute '(apply|__wrapped__)'": (
        "asks for DeepSpeed's own linear layer"
    ),
    "must be gathered when its values are taken; got `numpy`": (
        "TRL hashes weights that are in pieces, which is an error here; on DeepSpeed they are empty"
    ),
    "must be gathered when its values are read or written; got `allclose`": (
        "compares weights that are in pieces, which is an error here; on DeepSpeed they are empty"
    ),
    "MultipleAllGatherHandles": "asks for DeepSpeed's own handles of an all-gather",
    r"engine\.tput_timer": "asks `engine.tput_timer` for times; it counts epochs alone",
    "comm dtype doesn't match module dtype": (
        "under `torch_autocast` parameters are fp32 here, whatever dtype the model had"
    ),
    r"deepspeed\.moe\.": "asks for DeepSpeed's own layer of experts",
    "launcher.runner|multinode_runner|utils.numa": "asks for the launcher's own functions",
    "moment tensors to be allocated": "looks into `optimizer.state`, which is not where moments are here",
    "^SystemExit": "starts the script, where DeepSpeed refuses `--num_nodes` beside `--include`",
    "to a tensor with grad_dtype": "assigns `param.grad` in fp16, and at stage 0 gradients are fp32 here",
    "progressive_layer_drop": "progressive layer drop is refused",
    "_ckpt_name": "asks for the names of DeepSpeed's files in a checkpoint",
    "`optimizer.torch_adam`: must be a key": "a key that DeepSpeed does not know either is an error here",
}
"""Text of an error in a test -> its meaning for readers of the table."""

_MISSING = re.compile(
    r"`(?:zerodrift\.)?(?:deepspeed\.)?([\w.]+)`: must be a name of the drop-in"
    r"|cannot import name '(\w+)'|No module named '([\w.]+)'|has no attribute '(\w+)'"
)


def results() -> list[SuiteResult]:
    return [SuiteResult(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def keep(found: Iterable[SuiteResult]) -> None:
    """Replace the results of these files."""
    rows = {(row.suite, row.file): row for row in [*results(), *found]}
    kept = [json.dumps(asdict(row)) for _, row in sorted(rows.items())]
    RESULTS.write_text("[\n" + ",\n".join(kept) + "\n]\n")


def run(
    python: Path, checkout: Path, environment: Mapping[str, str], suite: Suite, sources: str
) -> list[Outcomes]:
    """Run files of tests on zerodrift and on DeepSpeed; return the outcomes of each.

    A file that ran to its end runs again when the plugin is another or, on zerodrift, `sources`.
    """
    path = f"{PLUGINS}{os.pathsep}{environment['PYTHONPATH']}"
    plugin = "".join((PLUGINS / f"{name}.py").read_text() for name in ("deepspeed_suite", suite.plugin))
    told: list[Outcomes] = []
    on_zerodrift = [str(python), "-m", "zerodrift", "run", "--"]
    for name, before, of in (("zerodrift", on_zerodrift, sources), ("deepspeed", [], "")):
        digest = hashlib.sha256(f"{plugin}{of}{suite.options}".encode()).hexdigest()[:16]
        folder = python.parents[1] / "suites" / name / digest
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, tuple[str, str]] = {}
        for number, file in enumerate(suite.files, 1):
            outcomes = folder / f"{file.replace('/', '.')}.jsonl"
            print(f"[{number}/{len(suite.files)}] {file} on {name}", flush=True)
            if not outcomes.exists():
                draft = outcomes.with_suffix(".draft")
                draft.write_text("")
                options = ["-q", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
                options += ["-p", suite.plugin, "--outcomes", str(draft), *suite.options]
                command = [*before, str(python), "-m", "pytest", *options, file]
                with outcomes.with_suffix(".log").open("w") as printed:
                    processes.run(
                        command, {**environment, "PYTHONPATH": path}, checkout / suite.start, printed, LIMIT
                    )
                draft.replace(outcomes)
            found |= read(outcomes)
        told.append(found)
    return told


def table(found: Iterable[SuiteResult]) -> str:
    """Return a row for each file."""
    lines = ["| tests | file | pass on DeepSpeed | of these here | why not |", "| --- " * 5 + "|"]
    for row in found:
        why = (
            "; ".join(f"{count}: {text}" for text, count in row.why.items())
            .replace("|", "/")
            .replace("<", "&lt;")
            or "-"
        )
        there = "not run" if row.there is None else row.there
        counted = row.here + sum(row.why.values())
        if not counted:
            continue
        here = f"{row.here} of {counted}"
        lines.append(f"| {row.suite} | `{row.file}` | {there} | {here} | {why} |")
    return "\n".join(lines) + "\n"
