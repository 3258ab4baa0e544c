"""Folders of data as people publish and clone them: what of them is read, and what is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import arrow_stream, data, jsonl, made, parts_of
from zerodrift.errors import ConfigError
from zerodrift.train.data.tokenizer import ByteTokenizer

LETTERS = ByteTokenizer()


def published(folder: Path) -> Path:
    """A data set as it is cloned."""
    (folder / ".git").mkdir(parents=True)
    for name, count in (("train", 3), ("test", 2)):
        jsonl(folder / f"data/{name}-00000-of-00001.jsonl", [{"prompt": name, "completion": "b"}] * count)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Data\n")
    for name in (".gitattributes", ".git/config", "LICENSE", "dataset_infos.json"):
        (folder / name).write_text("{}")
    return folder


def counts(folder: Path, path: Path, **rest: Any) -> Any:
    """What was read of the one set of a path."""
    (found,) = made(folder, data(path, **rest)).sets
    return found.counts


def test_of_a_cloned_data_set_its_data_is_read(tmp_path: Path) -> None:
    folder = published(tmp_path / "set")
    found = made(tmp_path, data(folder, block=64, validation=str(folder)))
    assert found.validation is not None
    assert (len(found.train), len(found.validation)) == (3, 2)
    train = found.sets[0].counts
    assert train.files == 1
    assert train.beside == ("1 file of the split `test`", "LICENSE", "README.md", "dataset_infos.json")
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 40)
    assert counts(tmp_path, tmp_path / "*.txt", block=64).files == 2, "a glob names files itself"


def test_a_card_says_which_files_are_of_which_split(tmp_path: Path) -> None:
    folder = published(tmp_path / "set")
    card = "---\nconfigs:\n- config_name: {}\n  data_files:\n  - split: train\n    path: data/test*\n"
    (folder / "README.md").write_text(card.format("main") + "---\n")
    assert len(made(tmp_path, data(folder, block=64)).train) == 2
    other = "- config_name: more\n  data_files: data/train*\n---\n"
    (folder / "README.md").write_text(card.format("main") + other)
    with pytest.raises(ConfigError, match=r"must name the files of one subset; got .*`main`, `more`"):
        made(tmp_path, data(folder))


def test_a_folder_of_both_of_neither_or_of_other_splits_is_asked_about(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "notes.txt").write_text("a text " * 20)
    jsonl(folder / "rows.jsonl", [{"text": "a"}])
    with pytest.raises(
        ConfigError, match=r"must name folders of rows or of texts.*rows\.jsonl and notes\.txt"
    ):
        made(tmp_path, data(folder))
    for rest, files in (({"pattern": "*.txt"}, 1), ({"format": "files"}, 2)):
        assert counts(tmp_path, folder, **rest).files == files
    (tmp_path / "none").mkdir()
    (tmp_path / "none/a.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match=r"files of a known kind; got '.*', with a\.zip"):
        made(tmp_path, data(tmp_path / "none"))
    for split in ("dev", "test"):
        file = jsonl(tmp_path / f"splits/{split}.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match="must name files, or a folder with a split `train`"):
        made(tmp_path, data(file.parent))


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
    found, _ = parts_of(made(tmp_path, data(file)).train, 0)
    assert LETTERS.decode(found[0]) == "x" * 16


def test_what_training_wrote_is_no_data(tmp_path: Path) -> None:
    """A folder of texts in which somebody trains, and trains again."""
    (tmp_path / "a.txt").write_text("a text to train on " * 9)
    for name in ("runs/a", "cache/0123"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/a/job.json", "runs/a/plan.json", "cache/digests.json", "cache/0123/blocks.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "runs/a/report.html").write_text("<html>")
    reading = counts(tmp_path, tmp_path)
    assert reading.files == 1
    assert reading.beside == ("cache, which training wrote", "runs/a, which training wrote")


def test_splits_that_datasets_saved_are_those_of_its_list(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train_sft", "train_gen"]}')
    for name in ("train_sft", "train_gen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data-0.arrow").write_bytes(arrow_stream([{"text": name}] * 9))
    with pytest.raises(ConfigError, match=r"a split `train`; got .* with `train_gen`, `train_sft`"):
        made(tmp_path, data(tmp_path))
    assert counts(tmp_path, tmp_path / "train_sft").train.documents == 9


def test_splits_of_texts_are_told_apart_and_programs_are_not(tmp_path: Path) -> None:
    for name in ("wiki.train.txt", "wiki.test.txt", "wiki.valid.txt"):
        (tmp_path / "wiki").mkdir(exist_ok=True)
        (tmp_path / "wiki" / name).write_text("a text " * 9)
    reading = counts(tmp_path, tmp_path / "wiki")
    assert (reading.files, len(reading.beside)) == (1, 2)
    code = tmp_path / "code"
    code.mkdir()
    for name in ("train.py", "test.py", "README.md"):
        (code / name).write_text("print(1)\n" * 9)
    (code / "package.json").write_text('{"name": "code"}')
    reading = counts(tmp_path, code)
    assert (reading.files, reading.beside) == (3, ("package.json",))
    (code / "alpaca.json").write_text('[{"instruction": "a", "output": "b"}]')
    with pytest.raises(ConfigError, match=r"not of both; got .* with alpaca\.json and "):
        made(tmp_path, data(code))


def test_token_maps_of_two_splits_are_not_one(tmp_path: Path) -> None:
    for name, count in (("train", 640), ("val", 64)):
        (np.arange(count) % 250).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    written = data(tmp_path, validation=str(tmp_path))
    prepared = made(tmp_path, written)
    assert prepared.validation is not None
    assert (len(prepared.train), len(prepared.validation)) == (40, 4)
