"""The pages are true: their code runs, their output is fresh, their arithmetic holds, their links resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

import zerodrift
import zerodrift.errors as errors_module
from tests.unit.models import parameter
from tests.unit.test_layers import ROOMS
from tests.unit.tools import load_tool
from zerodrift.inspect.audit.results import FindingKind
from zerodrift.inspect.check.table import Kind
from zerodrift.model.spec import ModelSpec
from zerodrift.plan.bill import Cost

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
RUNNING = (
    *("README.md", "docs/plan.md", "docs/pipelines.md", "docs/weights.md"),
    *("docs/migrating.md", "docs/engine.md", "docs/api.md"),
)
"""Pages whose Python runs as a whole, except below `<!-- excerpt -->`; other pages have excerpts."""

MODEL = "examples/qwen3-moe-tiny"
LOCK = (ROOT / "requirements" / "lock.txt").read_text()


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(language: str, names: tuple[str, ...] = ()) -> list[Any]:
    """Return the fenced blocks of a language, as parameters of a test."""
    found = []
    for path in PAGES:
        if names and name_of(path) not in names:
            continue
        pattern = rf"^(?<!<!-- excerpt -->\n)```{language}\n(.*?)^```"
        texts = re.findall(pattern, path.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [pytest.param(text, id=f"{name_of(path)}-{n}") for n, text in enumerate(texts)]
    return found


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the root of the repository, which paths on the pages begin at."""
    monkeypatch.chdir(ROOT)


# --- code and output --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", blocks("python", RUNNING))
def test_python_on_a_page_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    exec(compile(text, "page", "exec"), {"__name__": "page"})
    assert ("print(" in text) == bool(capsys.readouterr().out)


@pytest.mark.parametrize("text", blocks("yaml", ("README.md", "docs/precision.md", "docs/config.md")))
def test_yaml_on_a_page_plans(text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.yaml").write_text(text)
    assert zerodrift.make_plan(tmp_path / "config.yaml", MODEL, world_size=2).rows


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    """Return `tools/refresh.py`, which writes the pages."""
    return load_tool("refresh")


@pytest.fixture(scope="module")
def generated(refresh: ModuleType) -> dict[str, str]:
    """Return the pages that are generated as a whole, by name."""
    return refresh.generated()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_is_fresh(path: Path, refresh: ModuleType, generated: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    if path.name == "simulate.md" and f"transformers=={transformers.__version__} " not in LOCK:
        pytest.skip("its figures are those of the operations of the locked transformers")
    text = path.read_text(encoding="utf-8")
    wanted = generated[path.name] if path.name in generated else refresh.fresh(text)
    assert text == wanted, "run `make docs`"


def test_the_notebook_is_the_tutorial(refresh: ModuleType) -> None:
    assert page("examples/start.ipynb") == refresh.notebook(), "run `make docs`"


# --- errors and findings ------------------------------------------------------------------------------


def test_every_kind_of_error_and_finding_is_explained() -> None:
    text = page("docs/errors.md")
    headings = set(re.findall(r"^### (.*)$", text, flags=re.MULTILINE))
    errors = [
        each
        for each in vars(errors_module).values()
        if isinstance(each, type) and issubclass(each, Exception)
    ]
    kinds = {error.kind for error in errors} | {kind for kind, _ in errors_module.KINDS}
    findings = {*get_args(Kind), *(kind.replace(" ", "-") for kind in get_args(FindingKind))}
    assert headings == kinds | findings
    for section in text.split("\n### ")[1:]:
        assert section.count("**Cause.**") == section.count("**Fix.**") == 1, section.partition("\n")[0]


# --- numbers ----------------------------------------------------------------------------------------


def rows(name: str, heading: str) -> Iterator[list[str]]:
    """Yield the rows of the first table below a line that contains `heading`."""
    lines = iter(page(name).partition(heading)[2].splitlines())
    table = False
    for line in lines:
        if line.startswith("|"):
            table = True
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if "---" not in line:
                yield [cell.strip() for cell in cells]
        elif table:
            return


def value(text: str) -> float:
    """Compute the arithmetic of a page: `(2 x 1,118,720 + 4 x 4,096) / 2`."""
    plain = text.replace(",", "").replace(" x ", " * ")
    assert re.fullmatch(r"[\d *+/().-]+", plain), text
    return float(eval(plain))


def figure(bill: Cost, label: str) -> int:
    """Return a figure of a bill, by its name on a page."""
    if label.startswith("`"):
        part, _, name = label.strip("`").partition(".")
        return int(getattr(getattr(bill, part), name))
    op, *words = label.replace("-", "_").split(", ")
    purpose, dtype = words if len(words) == 2 else ("reduce", words[0])
    (line,) = (each for each in bill.traffic if (each.op, each.purpose, each.dtype) == (op, purpose, dtype))
    return line.bytes


def test_the_bill_by_hand_is_the_bill() -> None:
    pytest.importorskip("transformers")
    plan = zerodrift.make_plan("examples/moe-pinned.yaml", MODEL, world_size=2)
    head, *lines = rows("docs/plan.md", "### By hand\n")
    assert head == ["segment", "elements", "with padding"]
    segments = {(segment.numel, segment.padded) for segment in plan.segments}
    assert {(value(numel), value(padded)) for _, numel, padded in lines} == segments
    head, *lines = rows("docs/plan.md", "both segments of the block behind it travel.\n")
    assert head == ["figure", "by hand", "bytes"] and len(lines) == 10
    bill = zerodrift.cost(plan)
    for label, by_hand, total in lines:
        assert value(by_hand) == value(total) == figure(bill, label), label


def even(world: int = 4) -> ModelSpec:
    """Return a model of one block without padding."""
    return ModelSpec("even", (parameter("layers.0.mlp.up.weight", (256, 16 * world)),))


def test_bytes_at_rest_are_those_of_the_table() -> None:
    head, *lines = rows("docs/precision.md", "## What it costs\n")
    assert head[1:] == ["storage", "master", "state", "at rest", "accumulate"]
    assert len(lines) == 9
    for written, *numbers in lines:
        config = {"precision": yaml.safe_load(written.strip("`")), "zero_optimization": {"stage": 3}}
        bill = zerodrift.cost(zerodrift.make_plan(config, even(), world_size=4))
        rest = bill.rest
        found = [rest.storage, rest.master, rest.state, rest.total, bill.peak.accumulate]
        assert [each * 4 / bill.parameters for each in found] == [float(each) for each in numbers], written


def test_bytes_on_the_wire_are_those_of_the_table() -> None:
    head, *lines = rows("docs/plan.md", "`reduce: bf16`:\n")
    assert head == ["config", "m = 1", "m = 8", "m = 1, bf16 wire", "m = 8, bf16 wire"]
    assert len(lines) == 6
    for written, *numbers in lines:
        block = yaml.safe_load(written.strip("`"))
        found = []
        for precision in ({"mode": "bf16"}, {"mode": "bf16", "reduce": "bf16"}):
            config: dict[str, Any] = {"precision": precision, "zero_optimization": {"stage": block["stage"]}}
            if "keep_gathered" in block:
                config["sharding"] = {"keep_gathered": block["keep_gathered"]}
            plan = zerodrift.make_plan(config, even(), world_size=4)
            for count in (1, 8):
                bill = zerodrift.cost(plan, count)
                sent = sum(line.bytes for line in bill.traffic if line.purpose != "norm")
                found.append(sent / bill.parameters / (3 / 4))
        assert found == [float(number) for number in numbers], written


# --- words that must agree --------------------------------------------------------------------------


def test_the_rooms_are_those_that_the_layers_test_enforces() -> None:
    head, *lines = rows("docs/architecture.md", "## 3. The rooms\n")
    assert head == ["room", "what it does"]
    assert [room.strip("`") for room, _ in lines] == list(ROOMS)


def test_the_stages_are_those_of_the_plan() -> None:
    lines = list(rows("docs/architecture.md", "so there are no stage classes:\n"))
    assert lines[0] == ["stage", "`storage`", "`reduce.when`", "`accumulate`", "`master`, `state`"]
    for stage, storage, when, accumulate, master in lines[1:]:
        config = {"precision": {"mode": "bf16"}, "zero_optimization": {"stage": int(stage)}}
        columns = zerodrift.make_plan(config, even(), world_size=4).rows[0].columns
        assert columns.update is not None
        axes = (columns.storage.axis, columns.update.accumulate.axis, columns.update.axis)
        assert [("sharded" if axis else "whole") for axis in axes] == [storage, accumulate, master]
        assert columns.update.reduce.when == when


# --- links and commands -----------------------------------------------------------------------------


def without_code(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    titles = re.findall(r"^#+ (.*)$", without_code(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def test_targets_on_a_page_exist() -> None:
    """`test_words.py` checks verbs and options."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", page("Makefile"), flags=re.MULTILINE))
    for path in PAGES:
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), flags=re.MULTILINE)) <= targets, (
            path
        )
