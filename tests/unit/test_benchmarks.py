"""Claimed figures on pages were measured: each is a cell of a file in `bench/results`."""

from __future__ import annotations

import datetime
import importlib
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "bench" / "results").glob("*.json"))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return modules of the folder, by name."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    names = ("again", "benchmarks", "claims", "plots", "result")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_a_result_says_how_it_was_made(bench: SimpleNamespace) -> None:
    for path in RESULTS:
        result = bench.result.read(path)
        assert path.read_text() == result.json(), "as `save` writes it"
        assert datetime.date.fromisoformat(result.date) <= datetime.date.today()
        assert result.title and result.beside and "cores" in result.machine and "torch" in result.versions
        assert result.tables and all(table.rows for table in result.tables), path
        for table in result.tables:
            assert all(len(table.texts(row)) == len(table.columns) for row in table.rows)


def test_a_claim_is_held_to_its_limit_and_what_is_missed_is_shown_as_missed(bench: SimpleNamespace) -> None:
    """A limit is the largest admitted figure, or the least."""
    figure, claim = bench.claims.Figure(1.05, ".2f", "step-fp32"), bench.claims.Claim
    for at_least, limits in ((False, {1.05: True, 1.04: False}), (True, {1.05: True, 1.06: False})):
        for limit, met in limits.items():
            assert claim("", "", figure, {}, bench.claims.Limit(limit, at_least=at_least)).met is met
    assert claim("", "", figure, {}, None).met is None
    results = bench.claims.Results()
    found = list(bench.claims.claims(results))
    assert {claim.met for claim in found} == {True, False, None}
    text = bench.benchmarks.claims_text(False, results)
    lines = text.splitlines()[2:]
    assert len(lines) == len(found)
    for claim, line in zip(found, lines, strict=True):
        assert ("**missed**" in line) == (claim.met is False)
        assert f"| {claim.figure} |" in line and results[claim.figure.source].date in line


CLAIMS = {
    "README.md": ("host", "ms", "26.6"),
    "docs/benchmarks.md": ("persistent", "tensors", "12.00"),
}
"""Page -> a result that it claims, one of its columns, and a figure on the page."""


@pytest.mark.parametrize("name", CLAIMS)
def test_another_figure_on_a_page_or_a_claim_without_a_result_is_found(
    bench: SimpleNamespace, tmp_path: Path, name: str
) -> None:
    """`test_docs.py` compares pages with generated ones: a cell that changes makes another page."""
    text, (source, column, figure) = (ROOT / name).read_text(encoding="utf-8"), CLAIMS[name]
    results = bench.claims.Results()
    assert bench.benchmarks.refresh(text, results) == text, "run `make docs`"
    table = results[source].tables[0]
    for row in table.rows:
        row[list(table.columns).index(column)] += 1
    assert bench.benchmarks.refresh(text, results) != text
    edited = text.replace(f"| {figure} |", "| 11.00 |")
    assert bench.benchmarks.refresh(edited, bench.claims.Results()) == text != edited
    for path in (path for path in RESULTS if path.stem != source):
        shutil.copy(path, tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"bench/results/{source}\.json: must be there"):
        bench.benchmarks.refresh(text, bench.claims.Results(tmp_path))


def test_the_page_shows_every_result_and_says_what_was_not_measured() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- result: (\S+) -->", text)
    assert sorted(shown) == sorted(path.stem for path in RESULTS)
    for name in ("README.md", "docs/benchmarks.md"):
        assert re.search(r"several\s+GPUs have not been (tried|measured)", (ROOT / name).read_text())


def test_pictures_are_those_of_the_results(bench: SimpleNamespace) -> None:
    drawn = bench.benchmarks.plot_files(bench.claims.Results())
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert len(drawn) == 7
    for name, picture in drawn.items():
        assert f"(img/{name})" in page
        assert (ROOT / "docs" / "img" / name).read_text(encoding="utf-8") == picture, "run `make docs`"
