"""Which files, columns and splits are read, what is asked about them, and what `zerodrift data` shows."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import TALK, arrow_stream, data, jsonl, made, stream, tree
from zerodrift.errors import ConfigError
from zerodrift.train.data import documents
from zerodrift.train.job_file import read_job
from zerodrift.train.report.summary import preview

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


def test_a_column_of_another_name_is_found_or_asked_for(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"n": 3, "story": "x" * 40}])
    assert bytes(stream(made(tmp_path, data(file)).train)[:16].tolist()) == b"x" * 16
    file = jsonl(tmp_path / "b.jsonl", [{"a": "b", "c": "d"}])
    with pytest.raises(ConfigError, match=r"in one column; got `a`, `c`.*`data\.field`"):
        made(tmp_path, data(file))


WROTE = ("runs/a/job.json", "runs/a/plan.json", "cache/digests.json", "cache/0/blocks.json")
READ: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "what training wrote is no data": ({"a.txt": TEXT, **dict.fromkeys(WROTE, "{}")},
        *(1, ("cache, which training wrote", "runs/a, which training wrote"))),
    "splits of texts": ({f"wiki.{name}.txt": TEXT for name in ("train", "test", "valid")},
        *(1, ("1 file of the split `test`", "1 file of the split `validation`"))),
    "programs are no splits": ({"train.py": TEXT, "test.py": TEXT, "a.json": "{}"}, 2, ("a.json",)),
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


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_what_an_editor_adds_is_no_token(suffix: str, tmp_path: Path) -> None:
    """Neither the mark of Unicode nor the line ends of Windows are."""
    text = "a text, with Übung in it\n" * 20
    written = text if suffix == "txt" else (json.dumps({"text": text}) + "\n") * 2
    for content in (codecs.BOM_UTF8 + written.encode(), written.replace("\n", "\r\n").encode()):
        (tmp_path / f"a.{suffix}").write_bytes(content)
        found = stream(made(tmp_path, data(tmp_path / f"a.{suffix}")).train)
        assert found[: len(text.encode())].tolist() == [*text.encode()]


ASKED = {"prompt": "Hi", "completion": "Yo"}


@pytest.mark.parametrize(
    ("rows", "keys", "words"),
    [
        ([ASKED], {"field": "body"}, r"a\.jsonl:1.*must have a text in `body`; got `prompt`"),
        ([ASKED], {"field": "prompt", "format": "chat"}, r"data\.field.*conversations"),
        ([ASKED], {"messages": "dialog"}, "must have `dialog`, which `data.messages` names; got `prompt`"),
        ([ASKED], {"format": "tokens"}, r"a\.jsonl.*must be a map of token numbers"),
        *(([], {"train": name}, "data.train.*must name") for name in ("", "x" * 5000, "/dev/zero")),
    ],
)
@pytest.mark.timeout(30)
def test_keys_that_name_other_columns_are_refused(rows: Any, keys: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, data(jsonl(tmp_path / "a.jsonl", rows), **keys))


def test_keys_that_name_columns_name_those_of_the_rows(tmp_path: Path) -> None:
    found = made(tmp_path, data(jsonl(tmp_path / "a.jsonl", [ASKED, ASKED]), field="prompt"))
    assert stream(found.train)[:6].tolist() == [*b"Hi", 256, *b"Hi", 256]
    both = jsonl(tmp_path / "c.jsonl", [{"messages": TALK, "text": "Hi", "n": None}])
    reading = made(tmp_path, data(both, block=64)).sets[0].counts
    assert (reading.kind, reading.unread) == ("chat", ["text"]), "what is empty is not missed"


def test_what_may_not_be_meant_is_noted(tmp_path: Path) -> None:
    silent = [*TALK[:-1], {"role": "assistant", "content": " \n"}]
    chats = jsonl(tmp_path / "chats.jsonl", [{"messages": turns} for turns in (TALK, TALK, silent)])
    once = jsonl(tmp_path / "held.jsonl", [{"messages": turns} for turns in (TALK, TALK[:3])])
    found = made(tmp_path, data(chats, block=64, validation=str(once)))
    notes, held = (dict(each.counts.facts())["look at"].split("; ") for each in found.sets)
    assert {*notes} > {
        "1 conversation like another one",
        "1 conversation with an answer of nothing, which is not learned",
    }
    assert held[-1] == "1 conversation trained on as well" not in notes
    assert "the tokenizer has no chat template" in held[0]
    (tmp_path / "cache" / found.sets[1].key / documents.DIGESTS).write_bytes(b"1234")
    with pytest.raises(ConfigError, match="must hold the blocks that were written"):
        made(tmp_path, data(chats, block=64, validation=str(once)))


def test_one_file_is_read_once_by_whatever_path(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    (tmp_path / "b.txt").symlink_to(file)
    found = made(tmp_path, data(Path("unused"), train=[str(file), f"{tmp_path}/../{tmp_path.name}/b.txt"]))
    (reading,) = (each.counts for each in found.sets)
    assert reading.files == 1 and "a.txt, which is " in reading.beside[0]


# --- what is shown ------------------------------------------------------------------------------------


CHATS: list[dict[str, Any]] = [
    *({"id": n, "prompt": f"{n}: 你好 \x1b[31m" + "?" * n, "completion": "Antwort.\n" * 3} for n in range(9)),
    {"id": 9, "messages": [{"role": "user", "content": "nobody answers"}]},
    {"id": 10, "prompt": "x" * 300, "completion": "never seen"},
]


def preview_of(folder: Path, color: bool = False, **data: Any) -> str:
    file = jsonl(folder / "a.jsonl", CHATS)
    written = {"train": str(file), "block": 128, "validation": 0.2, "seed": 2, "format": "chat", **data}
    job, _ = read_job({"model": {"source": "a:b"}, "data": written, "run": {"folder": str(folder / "run")}})
    return preview(job, color=color, width=80)


def test_what_is_learned_is_marked_with_and_without_colour(tmp_path: Path) -> None:
    plain = preview_of(tmp_path)
    words = " ".join(plain.split())
    assert "1 file, 11 conversations" in words and "`prompt` and `completion` (10)" in words
    assert "1 conversation without a turn of the assistant to learn" in words and "columns `id`" in words
    assert plain.count("  [[Antwort.\n  Antwort.\n  Antwort.\n  <end>]]\n") == 3
    assert "\x1b" not in plain and r"\x1b[31m" in plain, "what is in data does not rule a terminal"
    assert "\x1b[32m[[Antwort." in preview_of(tmp_path, color=True)
    packed = preview_of(tmp_path, pack=True, attend="document", block=512)
    assert "--- another document ---" in packed and "[[Antwort." in packed
