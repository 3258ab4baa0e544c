"""Published and cloned folders of data: the files that are read, and the questions that are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import arrow_stream, data, jsonl, made, stream, tree
from zerodrift.errors import ConfigError

TEXT, ROW = "a text to train on " * 9, [{"text": "a"}]


def write_folder(folder: Path, card: str = "license: mit") -> Path:
    """Write a data set in the form of a clone."""
    beside = (".gitattributes", ".git/config", "LICENSE", "dataset_infos.json")
    files: Any = {name: "{}" for name in beside} | {"README.md": f"---\n{card}\n---\n# Data\n"}
    for name, count in (("train", 3), ("test", 2)):
        files[f"data/{name}-00000-of-00001.jsonl"] = [{"prompt": name, "completion": "b"}] * count
    return tree(folder, files)


def counts(folder: Path, path: Path, **rest: Any) -> Any:
    """Return the counts of a path's only set."""
    (found,) = made(folder, data(path, **rest)).sets
    return found.counts


def test_of_a_cloned_data_set_its_data_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set")
    found = made(tmp_path, data(folder, block=64, validation=str(folder)))
    assert found.validation is not None
    assert (len(found.train), len(found.validation)) == (3, 2)
    train = found.sets[0].counts
    assert train.files == 1
    assert train.beside == ("1 file of the split `test`", "LICENSE", "README.md", "dataset_infos.json")
    tree(tmp_path, {"train.txt": TEXT, "valid.txt": TEXT + "."})
    assert counts(tmp_path, tmp_path / "*.txt", block=64).files == 2, "a glob names files itself"


def test_a_card_says_which_files_are_of_which_split(tmp_path: Path) -> None:
    files = "data_files:\n  - split: train\n    path: data/test*"
    card = f"configs:\n- config_name: main\n  {files}"
    assert len(made(tmp_path, data(write_folder(tmp_path / "one", card), block=64)).train) == 2
    two = write_folder(tmp_path / "two", f"{card}\n- config_name: more\n  data_files: data/train*")
    with pytest.raises(ConfigError, match=r"must name the files of one subset; got .*`main`, `more`"):
        made(tmp_path, data(two))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows and texts": ({"notes.txt": TEXT, "rows.jsonl": ROW},
        r"must name folders of rows or of texts.*rows\.jsonl and notes\.txt"),
    "rows and programs": ({"train.py": TEXT, "alpaca.json": '[{"instruction": "a", "output": "b"}]'},
        r"not of both; got .* with alpaca\.json and "),
    "other splits": ({"dev.jsonl": ROW, "test.jsonl": ROW},
        "must name files, or a folder with a split `train`"),
    "no data": ({"a.zip": b"PK\x03\x04"}, r"files of a known kind; got '.*', with a\.zip"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_may_be_read_in_two_ways_or_none_is_asked_about(kind: str, tmp_path: Path) -> None:
    files, words = REFUSED[kind]
    folder = tree(tmp_path / "asked", files)
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, data(folder))
    if kind == "rows and texts":
        for rest, count in (({"pattern": "*.txt"}, 1), ({"format": "files"}, 2)):
            assert counts(tmp_path, folder, **rest).files == count


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"id": "1", "content": "x" * 40}, ""),
        ({"n": 3, "story": "x" * 40}, ""),
        ({"a": "b", "c": "d"}, "`a`, `c`"),
    ],
)
def test_a_column_of_another_name_is_found_or_asked_for(
    columns: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = jsonl(tmp_path / "a.jsonl", [columns])
    if words:
        with pytest.raises(ConfigError, match=rf"in one column; got {words}.*`data\.field`"):
            made(tmp_path, data(file))
        return
    assert bytes(stream(made(tmp_path, data(file)).train)[:16].tolist()) == b"x" * 16


WROTE = (
    "runs/a/job.json",
    "runs/a/plan.json",
    "runs/a/report.html",
    "cache/digests.json",
    "cache/0/blocks.json",
)
READ: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "what training wrote is no data": ({"a.txt": TEXT, **dict.fromkeys(WROTE, "{}")},
        *(1, ("cache, which training wrote", "runs/a, which training wrote"))),
    "splits of texts": ({f"wiki.{name}.txt": TEXT for name in ("train", "test", "valid")},
        *(1, ("1 file of the split `test`", "1 file of the split `validation`"))),
    "programs are no splits": (
        {"train.py": TEXT, "test.py": TEXT, "README.md": TEXT, "package.json": '{"name": "code"}'},
        *(3, ("package.json",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_what_of_a_folder_is_read(kind: str, tmp_path: Path) -> None:
    files, count, beside = READ[kind]
    reading = counts(tmp_path, tree(tmp_path / "read", files))
    assert (reading.files, reading.beside) == (count, beside)


def test_splits_that_datasets_saved_are_those_of_its_list(tmp_path: Path) -> None:
    names = ("train_sft", "train_gen")
    saved = {f"{name}/data-0.arrow": arrow_stream([{"text": name}] * 9) for name in names}
    tree(tmp_path, {"dataset_dict.json": '{"splits": ["train_sft", "train_gen"]}', **saved})
    with pytest.raises(ConfigError, match=r"a split `train`; got .* with `train_gen`, `train_sft`"):
        made(tmp_path, data(tmp_path))
    assert counts(tmp_path, tmp_path / "train_sft").train.documents == 9


def test_token_maps_of_two_splits_are_not_one(tmp_path: Path) -> None:
    maps = {name: (np.arange(count) % 250).astype(np.uint16) for name, count in (("train", 640), ("val", 64))}
    tree(tmp_path, {f"{name}.bin": held.tobytes() for name, held in maps.items()})
    prepared = made(tmp_path, data(tmp_path, validation=str(tmp_path)))
    assert prepared.validation is not None
    assert (len(prepared.train), len(prepared.validation)) == (40, 4)
