"""Cached descriptions equal those that `transformers` builds, and go unused where these may differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_model_huggingface import LOADED, folder
from zerodrift.dtypes import DType
from zerodrift.files import cache_folder
from zerodrift.model import describe, huggingface
from zerodrift.model.huggingface import from_hf
from zerodrift.model.spec import ModelSpec, OwningModule, ParameterSpec
from zerodrift.record import encode

pytest.importorskip("transformers")

DESCRIBE = """
import json, sys
path, *sources = json.loads(sys.stdin.read())
sys.path[:] = path
from zerodrift.model import describe
from zerodrift.record import encode
specs = [encode(describe(each)) for each in sources]
print(json.dumps([specs, sorted({"torch", "transformers"} & sys.modules.keys())]))
"""


def test_a_model_is_described_again_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families = [*LOADED, ("gpt2", {}), ("mamba", {}), ("vit", {"architectures": None})]
    paths = [str(folder(tmp_path / str(at), *of[:1], **of[1])) for at, of in enumerate(families)]
    whole = [encode(from_hf(path)) for path in paths]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(huggingface, "_is_fresh", lambda: True)
        assert [encode(describe(path)) for path in paths] == whole
    assert len(list((tmp_path / "cache").glob("zerodrift/models/*.json"))) == len(paths)
    command, asked = [sys.executable, "-c", DESCRIBE], json.dumps([sys.path, *paths])
    done = subprocess.run(command, input=asked, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [whole, []]


SPEC = ModelSpec(
    "Tiny",
    (
        ParameterSpec(
            ("a", "b"), (2, 3), DType.BF16, (OwningModule("", "x.Y"), OwningModule("b", "")), used=(1, 2)
        ),
    ),
    checkpoint=(("a", DType.FP16),),
    containers=frozenset({"layers", "heads"}),
    shared=(("b", "a"),),
)


def test_an_entry_holds_until_a_file_behind_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, entry = tmp_path / "model.py", tmp_path / "models" / "entry.json"
    source.write_text("x")
    monkeypatch.setattr(huggingface, "_imported", lambda: [str(source)])
    assert huggingface.read_description(entry) is None
    huggingface.write_description(entry, SPEC)
    assert huggingface.read_description(entry) == SPEC
    whole = entry.read_text()
    changed = (whole.replace('"bf16"', '"bf17"'), whole.replace("names", "nomen"))
    for damaged in (whole[:-9], "[]", "{}", *changed):
        entry.write_text(damaged)
        assert huggingface.read_description(entry) is None
    entry.write_text(whole)
    source.write_text("xy")
    assert huggingface.read_description(entry) is None
    source.unlink()
    assert huggingface.read_description(entry) is None
    assert not list(entry.parent.glob("*.new"))


def test_old_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "CACHED", 2)
    for at, name in enumerate(("a", "b", "c")):
        huggingface.write_description(tmp_path / "models" / f"{name}.json", SPEC)
        os.utime(tmp_path / "models" / f"{name}.json", (at, at))
    huggingface.write_description(tmp_path / "models" / "d.json", SPEC)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["c.json", "d.json"]


def test_an_entry_is_found_by_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert huggingface.entry_of({}, None) is None, "this process has imported torch"
    monkeypatch.setattr(huggingface, "_is_fresh", lambda: True)
    entries = [huggingface.entry_of({}, None) for _ in range(2)]
    entries += [huggingface.entry_of({"layers": 1}, None), huggingface.entry_of({}, DType.BF16)]
    monkeypatch.syspath_prepend(str(tmp_path))
    entries.append(huggingface.entry_of({}, None))
    (tmp_path / "apex-1.0.dist-info").mkdir()
    entries.append(huggingface.entry_of({}, None))
    assert entries[0] == entries[1] and len(set(entries)) == 5
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert cache_folder() is None and huggingface.entry_of({}, None) is None
