"""`zerodrift check` on the gallery: bugs are named by parameter and column, healthy runs get no finding."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.check.gallery import ANY, BUGS, ENVIRONMENT, HEALTHY, HERE, Script
from tests.e2e.launching import free_port

SECONDS = 280
SOURCE = HERE.parents[1] / "src"

pytestmark = (
    pytest.mark.slow
)  # each starts a launcher and two processes; tests/e2e/test_check.py has the likes


def cells(scripts: Iterable[Script]) -> list[Any]:
    return [pytest.param(script, id=script.name) for script in scripts]


def check(script: Script, folder: Path, *more: str) -> tuple[int, str, dict[str, Any]]:
    """Run a script; return its exit code, its output, and the file of `--save`."""
    saved = folder / "seen.json"
    options = ["--steps=3", f"--save={saved}", *more]
    if script.expect:
        options.append(f"--expect={HERE / script.expect}")
    done = _run(
        [sys.executable, "-m", "zerodrift", "check", *options, "--", *script.command(free_port())], folder
    )
    return done.returncode, done.stdout, json.loads(saved.read_text()) if saved.exists() else {}


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [ENVIRONMENT["PYTHONPATH"], str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )


def needs(script: Script) -> None:
    for package in script.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, which is not installed")


def is_mended(script: Script) -> bool:
    package, version = script.fixed
    return bool(package) and _numbers(importlib.metadata.version(package)) >= _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def findings(seen: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Return a (kind, parameter, column) for each parameter that a finding names."""
    return {
        (finding["kind"], name, finding["column"] or "")
        for finding in seen.get("findings", ())
        for name in finding["names"] or [""]
    }


def is_among(finding: tuple[str, str, str], found: set[tuple[str, str, str]]) -> bool:
    kind, parameter, column = finding
    return any((kind, column) == (k, c) and parameter in (ANY, p) for k, p, c in found)


@pytest.mark.parametrize("script", cells(BUGS))
def test_a_public_bug_is_named(script: Script, tmp_path: Path) -> None:
    needs(script)
    if is_mended(script):
        pytest.skip(f"fixed in {' '.join(script.fixed)}")
    code, printed, seen = check(script, tmp_path)
    found = findings(seen)
    missing = [finding for finding in script.findings if not is_among(finding, found)]
    assert not missing, f"{missing} not among {sorted(found)}\n{printed}"
    named = {kind for kind, _, _ in script.findings} | set(script.more)
    assert not {kind for kind, _, _ in found} - named, printed
    assert code == (3 if script.expect else 0), printed
    words = " ".join(printed.split())
    assert not [said for said in script.says if said not in words], printed
    assert script.keys is None or _keys_of_deepspeed(printed) == script.keys, printed


def _keys_of_deepspeed(printed: str) -> Any:
    block = re.search(r"^DeepSpeed\n(  \{$.*?^  \}$)", printed, flags=re.MULTILINE | re.DOTALL)
    return json.loads(block[1]) if block else None


@pytest.mark.parametrize("script", cells(script for script in BUGS if script.fix or script.keys))
def test_what_is_printed_mends_a_script(script: Script, tmp_path: Path) -> None:
    needs(script)
    text, config = (HERE / script.path).read_text(), tmp_path / "fixed.json"
    for old, new in script.fix:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "fixed.py").write_text(text)
    fixed = dataclasses.replace(script, path=str(tmp_path / "fixed.py"))
    if not script.fix:
        *before, file = script.arguments
        keys = json.loads(Path(file).read_text())
        for key, value in (script.keys or {}).items():
            keys[key] = {**keys.get(key, {}), **value} if isinstance(value, dict) else value
        config.write_text(json.dumps(keys))
        expect = str(config) if script.expect else ""
        fixed = dataclasses.replace(fixed, arguments=(*before, str(config)), expect=expect)
    code, printed, seen = check(fixed, tmp_path)
    assert {kind for kind, _, _ in findings(seen)} == {script.remains} - {""}, printed
    assert code == 0, printed


@pytest.mark.parametrize("script", cells(HEALTHY))
def test_a_healthy_run_has_no_finding(script: Script, tmp_path: Path) -> None:
    needs(script)
    code, printed, seen = check(script, tmp_path)
    assert not findings(seen), printed
    assert code == 0, printed


@pytest.mark.parametrize("kind", ["ddp_autocast", "fsdp2", "fsdp1"])
def test_the_numbers_are_those_without_the_observer(kind: str, tmp_path: Path) -> None:
    script = Script(kind, "torchrun", "healthy/plain.py", (kind, "digest"))
    alone = _run(script.command(free_port()), tmp_path).stdout
    _, watched, _ = check(script, tmp_path, "--keep-going")
    digests = re.findall(r"rank \d: [0-9a-f]{64}", alone)
    assert len(digests) == 2, alone
    assert sorted(digests) == sorted(re.findall(r"rank \d: [0-9a-f]{64}", watched)), watched
