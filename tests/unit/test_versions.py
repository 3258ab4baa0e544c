"""Versions: the page shows the tested ones, others give one warning, and packages are pinned."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

import zerodrift
from tests.unit.tools import ROOT, load_tool
from zerodrift import versions


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    return load_tool("matrix")


def ends(name: str) -> tuple[str, str]:
    return versions.TESTED[name]


def test_the_page_is_what_the_script_writes(matrix: ModuleType) -> None:
    page = matrix.PAGE.read_text()
    rows = matrix.rows_of(page)
    assert page.endswith(matrix.HEADING[1:] + matrix.render(rows).removeprefix(matrix.HEADING[1:]))
    assert {row.suite for row in rows} <= set(matrix.SUITES)
    for name, each_end in versions.TESTED.items():
        cells = {getattr(cell, name) for cell in matrix.CELLS} - {""}
        for end in each_end:
            assert any(version == end or version.startswith(f"{end}.") for version in cells), (name, end)


@pytest.mark.parametrize("name", versions.TESTED)
def test_what_is_tested_is_what_has_rows_without_a_failure(name: str, matrix: ModuleType) -> None:
    first, last = (versions.numbers(end) for end in ends(name))
    rows = [row for row in matrix.rows_of(matrix.PAGE.read_text()) if row.failed == "0"]
    found = {getattr(row, name) for row in rows} - {"-"}
    ran = {versions.numbers(version, ends(name)[0]) for version in found}
    assert (min(ran), max(ran)) == (first, last)
    if name != "transformers":  # two or three a month: the ends, and some between
        *same, low = first
        between = {(*same, number) for number in range(low, last[-1] + 1)}
        assert ran == between, "a version between has no row"


def test_the_ends_are_tested_and_what_is_beyond_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (first, last) in versions.TESTED.items():
        *above, final = map(int, last.split("."))
        newer = ".".join(map(str, (*above, final + 1)))
        for version in (first, last, f"{last}.1", f"{last}+cpu", f"{first}.0.post1"):
            assert versions.warning({name: version}) == "", version
        for version in ("0.0.1", f"{newer}.0a0+git1234", "99", "main", ""):
            told = versions.warning({name: version})
            assert f"{name} {version} (tested: {first} to {last})" in told and "\n" not in told
    told = versions.warning({"torch": "2.99.0", "python": "3.11.7", "transformers": "6.0"})
    assert "torch 2.99.0" in told and "transformers 6.0" in told and "python" not in told
    assert "\n" not in told
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers" not in versions.imported_versions() and "python" in versions.imported_versions()


def test_an_untested_version_is_one_line_of_the_first_rank_and_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(versions, "TESTED", {**versions.TESTED, "torch": ("1.0", "1.1")})
    versions.warn.cache_clear()
    try:
        for _ in range(2):
            config = {"optimizer": {"type": "AdamW"}}
            zerodrift.initialize(torch.nn.Linear(4, 4), config=config, device="cpu", quiet=True).destroy()
        (only,) = (text for text in caplog.messages if "not tested with" in text)
        version = versions.imported_versions()["torch"]
        assert only == f"zerodrift: not tested with torch {version} (tested: 1.0 to 1.1): check results"
        versions.warn.cache_clear()
        monkeypatch.setenv("RANK", "1")
        versions.warn()
        assert caplog.messages.count(only) == 1
    finally:
        versions.warn.cache_clear()


def test_the_version_is_the_same_wherever_it_stands_and_has_its_changes() -> None:
    text = {name: (ROOT / name).read_text() for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")}
    wanted = re.escape(versions.__version__)
    assert re.search(rf'^version = "{wanted}"$', text["pyproject.toml"], flags=re.MULTILINE)
    assert re.search(rf"^version: {wanted}$", text["CITATION.cff"], flags=re.MULTILINE)
    pattern = r"^## \[(.*?)\](?: - ([\d-]{10}))?$"
    first, second = re.findall(pattern, text["CHANGELOG.md"], flags=re.MULTILINE)[:2]
    assert first == ("Unreleased", "") and second[0] == versions.__version__
    assert re.search(rf"^date-released: {second[1]}$", text["CITATION.cff"], flags=re.MULTILINE)
    rows = [f'"Programming Language :: Python :: 3.{minor}"' for minor in range(10, 14)]
    assert ends("python") == ("3.10", "3.13") and all(row in text["pyproject.toml"] for row in rows)


def test_every_package_is_pinned_with_hashes() -> None:
    lock = (ROOT / "requirements" / "lock.txt").read_text()
    blocks = [block for block in re.split(r"\n(?=\S)", lock) if not block.startswith("#")]
    assert len(blocks) > 80
    assert not [block for block in blocks if not re.match(r"[\w.-]+==\S+[^\n]*\\\n\s+--hash=sha256:", block)]
