"""The pages are true: their code runs, their output is fresh, their arithmetic holds, their links resolve."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
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


def test_the_readme_is_short_and_shows_a_finding_and_the_table_of_a_plan() -> None:
    text = page("README.md")
    assert len(text.splitlines()) <= 150
    assert "no-master" in text.partition("$ zerodrift check ")[2].partition("```")[0]
    shown = text.partition("--world-size 2\n")[2].partition("```")[0]
    assert shown.startswith("set ") and "mlp.gate.weight" in shown


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/*.md")), ids=name_of)
def test_a_page_is_headed_by_the_question_that_it_answers(path: Path) -> None:
    assert re.search(r"^# (.*)$", path.read_text(), flags=re.MULTILINE)[1].endswith("?")  # type: ignore[index]
    assert len(list(ROOT.glob("docs/*.md"))) <= 25


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the website, without a dead link or a page outside of its navigation."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, ROOT / "tools/website.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_website_works_from_disk(site: Path) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 25
    for path in pages:
        text = path.read_text()
        assert 'rel="stylesheet" href="site.css"' in text
        assert not re.search(r'(src|href)="https?://[^"]*\.(js|css|svg|png)', text), path.name
    assert "no-master" in (site / "search.js").read_text()


class Outline(HTMLParser):
    """Elements of a page, in their order, and the attributes that assistive technology needs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def faults(self) -> Iterator[str]:
        tags = [tag for tag, _ in self.elements]
        levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
        if levels[:1] != [1] or levels.count(1) != 1:
            yield f"headings begin with {levels[:3]}, and {levels.count(1)} are of level 1"
        yield from (f"h{b} behind h{a}" for a, b in pairwise(levels) if b > a + 1)
        yield from (f"{tags.count(tag)} x {tag}" for tag in ("header", "nav", "main") if tags.count(tag) != 1)
        focused = next(attrs for tag, attrs in self.elements if tag in ("a", "button", "input"))
        if focused.get("href") != "#content":
            yield "the first element to get the focus does not skip to the page"
        ids = [attrs["id"] for _, attrs in self.elements if "id" in attrs]
        yield from (f"id {each} twice" for each in set(ids) if ids.count(each) > 1)
        for tag, attrs in self.elements:
            named = {"img": "alt", "th": "scope", "nav": "aria-label", "aside": "aria-label", "html": "lang"}
            if tag in named and not attrs.get(named[tag]):
                yield f"{tag} without {named[tag]}"
            if "tabindex" in attrs and tag == "div" and not (attrs.get("role") and attrs.get("aria-label")):
                yield "something that can be focused has no name"


def test_every_page_of_the_website_has_an_outline_for_a_screen_reader(site: Path) -> None:
    faults = {path.name: [*Outline(path.read_text()).faults()] for path in site.glob("*.html")}
    assert not {name: found for name, found in faults.items() if found}
    broken = '<html><a href="x"></a><main></main><h1 id="a"></h1><h3 id="a"></h3><img alt=""><th><nav></nav>'
    assert sorted(Outline(broken).faults()) == [
        "0 x header",
        *("h3 behind h1", "html without lang", "id a twice", "img without alt", "nav without aria-label"),
        *("th without scope", "the first element to get the focus does not skip to the page"),
    ]


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
        assert section.count("**Cause.**") == section.count("**Mend.**") == 1, section.partition("\n")[0]


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


def test_what_the_pages_say_of_bf16_is_so() -> None:
    torch = pytest.importorskip("torch")

    def bf16(number: float) -> float:
        return float(torch.tensor(number, dtype=torch.float64).bfloat16())

    assert bf16(256 + 1) == 256
    assert bf16(2048 + 15 * 0.5) == 2048
    assert bf16(1.0 + 0.0039) == 1.0 < bf16(1.0 + 0.004)
    sums = torch.linspace(1.0, 2.0, 1000, dtype=torch.float64).bfloat16().double()
    assert bool(((sums + sums / 512).bfloat16().double() == sums).all())
    assert not bool(((sums + sums / 256).bfloat16().double() == sums).all())


def test_the_sections_of_a_plan_are_those_that_are_described(refresh: ModuleType) -> None:
    pytest.importorskip("transformers")
    text = refresh.output(f"zerodrift plan examples/deepspeed/zero3-bf16.json --model {MODEL}")
    headings = re.findall(r"^([a-z][a-z ]*)(?:   .*)?$", text, flags=re.MULTILINE)
    described = page("docs/plan.md").lower()
    for heading in ("marks", "why", "decisions", "buffers", "ignored keys", "cost"):
        assert heading in headings and heading in described


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
