"""The files that a key of a job names: by name, by glob, or those of a folder.

A folder may be a data set as somebody published it: rows in files, some of them of other splits, beside a
README, a licence and a list of what is where. Then its rows are the data, one split of them is taken, and
what is left out is said. Where it does not say by itself what is data, that is asked.

Invariant: every file of a folder is taken, named as left out, or the folder is refused. Order is that of the
sorted paths, the same on every machine.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import glob
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zerodrift.errors import ConfigError, Problems, first_line
from zerodrift.files import kind as odd
from zerodrift.files import opened
from zerodrift.train.data.formats import OF_ROWS, suffix_of
from zerodrift.train.data.hub import advice
from zerodrift.train.data.texts import readable
from zerodrift.train.loop.job import Data

MAPS = (".npy", ".bin")
TEXTS = (
    *(".txt", ".md", ".rst", ".text", ".html", ".tex"),
    *(".py", ".c", ".h", ".cpp", ".cc", ".hpp", ".cu", ".rs", ".go", ".js", ".ts", ".java", ".sh"),
)
_ALSO_TEXTS = (".json", ".csv", ".tsv", ".jsonl", ".ndjson")
"""Suffixes of rows, where each file is to be a text."""
TRAIN, VALIDATION = "train", "validation"
SPLITS = {
    "train": TRAIN,
    "training": TRAIN,
    "validation": VALIDATION,
    "valid": VALIDATION,
    "val": VALIDATION,
    "dev": VALIDATION,
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""What files and folders of a split are called, as `datasets` knows them."""
_SPLIT = re.compile(rf"(?:^|[-._ /0-9])({'|'.join(SPLITS)})(?=$|[-._ /0-9])")
_PAPERS = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct|dataset_?card)\b.*"
    r"|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)
"""What lies beside data and is none."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a key."""

    files: tuple[Path, ...]
    """Sorted, each once, whatever leads to it."""
    left: tuple[str, ...] = ()
    """What lies in the folders beside them and is not read, in words."""


def find(written: str | Sequence[str], data: Data, where: str, split: str = TRAIN) -> DataFiles:
    """What a key names; of a folder that has several splits, the files of `split`."""
    problems = Problems()
    paths: dict[Path, None] = {}
    left: list[str] = []
    for text in [written] if isinstance(written, str) else written or [""]:
        if not text:
            problems.add(where, "must name files", got="no name")
            continue
        try:
            found, must = _named(text, data, split, where)
        except (OSError, RuntimeError, ValueError) as error:  # a name too long, a home that is not there
            found, must = DataFiles(()), f"must name files that are there ({first_line(error)[-80:]})"
        if not found.files:
            problems.add(where, must, got=_got(text, found.left), do=advice(text, "dataset"))
        paths |= dict.fromkeys(found.files)
        left += found.left
    problems.raise_as(ConfigError)
    once: dict[Path, Path] = {}
    for path in sorted(paths):
        if (first := once.setdefault(path.resolve(), path)) != path:
            left.append(f"{path}, which is {first}")
    return DataFiles(tuple(once.values()), tuple(left))


def _got(text: str, beside: Sequence[str]) -> str:
    """What was named, with what is there instead or where it was looked for."""
    there = f", with {', '.join(beside)}" if beside else ""
    here = not there and text[:1] not in ("/", "~")
    return f"{text!r}{there}" + (f" (looked for in {Path.cwd()})" if here else "")


def _named(text: str, data: Data, split: str, where: str) -> tuple[DataFiles, str]:
    """The files of one path or glob, and what must hold where there are none."""
    path = Path(text).expanduser()
    if path.is_dir():
        what = f"files that match {data.pattern!r}" if data.pattern else "files of a known kind"
        there, whole = _Folder(path, where), data.format == "files"
        found = DataFiles(tuple(there.files(data.pattern))) if data.pattern else there.data(split, whole)
        return found, f"must name folders with {what}"
    files = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    other = odd(path)
    must = f"must name files, not {other}" if other else "must name files that are there"
    return DataFiles(tuple(file for file in files if file.is_file())), must


@dataclass(frozen=True, slots=True)
class _Taken:
    """What is read of a folder."""

    files: Sequence[Path]
    others: Sequence[Path] = ()
    """Of other splits."""
    left: tuple[str, ...] = ()
    """Those in words."""


class _Folder:
    """What is in a folder, and which of it is data."""

    def __init__(self, folder: Path, where: str) -> None:
        self._folder, self._where = folder, where

    def files(self, pattern: str) -> list[Path]:
        return sorted(
            path
            for path in self._folder.rglob(pattern or "*")
            if path.is_file()
            and not any(part.startswith(".") for part in self._inside(path).parts)
            and not any(parent in self._written for parent in path.parents)
        )

    @functools.cached_property
    def _written(self) -> frozenset[Path]:
        """Folders of runs and of packed data: what was written by training is no data of it."""
        runs = {
            path.parent for path in self._folder.rglob("plan.json") if (path.parent / "job.json").is_file()
        }
        caches = {path.parent for path in self._folder.rglob("digests.json")}
        return frozenset((runs | caches) - {self._folder})

    def _inside(self, path: Path) -> Path:
        return path.relative_to(self._folder)

    def data(self, split: str, whole: bool) -> DataFiles:
        """What of it is data; `whole` is whether each file is a text, whatever it is called."""
        files = self.files("")
        taken = self._whole(files) if whole else self._listed(split) or self._guessed(files, split)
        rest = set(files) - set(taken.files) - set(taken.others)
        written = [f"{self._inside(path)}, which training wrote" for path in sorted(self._written)]
        return DataFiles(tuple(sorted(taken.files)), (*taken.left, *self._left(rest), *written))

    def _whole(self, files: Sequence[Path]) -> _Taken:
        return _Taken([file for file in files if suffix_of(file) in (*TEXTS, *_ALSO_TEXTS)])

    def _guessed(self, files: Sequence[Path], split: str) -> _Taken:
        """By what files are called and what lies beside them."""
        papers = [file for file in files if _PAPERS.fullmatch(file.name)]
        script = f"{self._folder.name}.py"
        others = [file for file in files if file not in papers and file.name != script]
        rows = [file for file in others if suffix_of(file) in OF_ROWS]
        texts = [file for file in others if suffix_of(file) in TEXTS]
        either = [file for file in others if suffix_of(file) == ".json" and (not texts or _holds_rows(file))]
        maps = [file for file in others if file.suffix.lower() in MAPS]
        rows += either
        if rows and texts:
            self._refuse_both(rows, texts)
        if rows:
            return self._split(rows, split)
        if texts and self._names_splits(texts):
            return self._split(texts, split)
        if texts:  # a README among them is one
            return _Taken([file for file in files if suffix_of(file) in TEXTS])
        return self._split(maps, split) if maps else self._whole(papers)

    def _refuse_both(self, rows: Sequence[Path], texts: Sequence[Path]) -> None:
        raise ConfigError(
            self._where,
            "must name folders of rows or of texts, and not of both",
            got=f"{self._folder} with {_few(map(self._inside, rows))} and {_few(map(self._inside, texts))}",
            do="Set `data.pattern`, or `data.format: files` to read each file as a text.",
        )

    def _names_splits(self, texts: Sequence[Path]) -> bool:
        """Whether texts are of splits, which they say plainly or not at all: a `test.py` is a program."""
        tops = {split_of(Path(self._inside(file).parts[0])) for file in texts}
        plain = all(suffix_of(file) in (".txt", ".text") for file in texts)
        return plain and TRAIN in tops and len(tops - {""}) > 1

    def _split(self, files: Sequence[Path], split: str) -> _Taken:
        """Those of a split, where there are several."""
        of: dict[str, list[Path]] = {}
        for file in files:
            of.setdefault(split_of(self._inside(file)), []).append(file)
        return _Taken(files) if len(of.keys() - {""}) < 2 else self._chosen(of, split)

    def _chosen(self, of: Mapping[str, Sequence[Path]], split: str) -> _Taken:
        wanted = "test" if split == VALIDATION and split not in of else split
        if wanted not in of:
            raise ConfigError(
                self._where,
                f"must name files, or a folder with a split `{split}`",
                got=f"{self._folder} with {', '.join(f'`{name}`' for name in sorted(of) if name)}",
                do="Name the files.",
            )
        others = {name: files for name, files in sorted(of.items()) if name != wanted}
        words = [
            f"{_count(len(files))} of {f'the split `{name}`' if name else 'no split'}"
            for name, files in others.items()
        ]
        return _Taken(of[wanted], [file for files in others.values() for file in files], tuple(words))

    def _left(self, files: Iterable[Path]) -> tuple[str, ...]:
        """In words: few by name, many by suffix."""
        files = sorted(files)
        if len(files) <= 4:
            return tuple(str(self._inside(file)) for file in files)
        kinds = Counter(file.suffix or "no suffix" for file in files)
        return (f"{len(files):,} other files ({', '.join(kind for kind, _ in kinds.most_common(5))})",)

    def _listed(self, split: str) -> _Taken | None:
        """The files that a card or a list names for a split; None where there is none, or it names none."""
        of = self._of_card() or self._of_dict()
        if len(of) < 2:
            return _Taken(next(iter(of.values()))) if of else None
        return self._chosen(of, split)

    def _of_dict(self) -> dict[str, list[Path]]:
        """The files of each split that `datasets` saved to disk, by the list that it leaves there."""
        with contextlib.suppress(OSError, ValueError), opened(self._folder / "dataset_dict.json") as stream:
            names = json.loads(stream.read())["splits"]
            of = {SPLITS.get(name, name): sorted((self._folder / name).rglob("*.arrow")) for name in names}
            return {name: files for name, files in of.items() if files}
        return {}

    def _of_card(self) -> dict[str, list[Path]]:
        """The files of each split that a card names."""
        subsets = {
            str(block.get("config_name", "default")): block["data_files"]
            for block in _card(self._folder / "README.md")
            if isinstance(block, dict) and block.get("data_files")
        }
        if not subsets:
            return {}
        name = next(iter(subsets)) if len(subsets) == 1 else "default"
        if name not in subsets:
            raise ConfigError(
                self._where,
                "must name the files of one subset",
                got=f"{self._folder} with {', '.join(f'`{name}`' for name in subsets)}",
                do="Name files or a folder in it: its README.md says which are whose.",
            )
        of: dict[str, list[Path]] = {}
        for key, globs in _by_split(subsets[name]).items():
            if files := _globbed(self._folder, globs):
                of.setdefault(SPLITS.get(key.lower(), key), []).extend(files)
        return of


def split_of(path: Path) -> str:
    """The split that a path inside of a folder is of by its name; `""` where it does not say."""
    found = _SPLIT.findall(path.as_posix().lower())
    return SPLITS[found[-1]] if found else ""


def _holds_rows(file: Path) -> bool:
    """Whether JSON beside texts is data and no setting of theirs: an array of objects, or several lines."""
    with readable(file), opened(file) as stream:
        start = stream.read(1 << 16).lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    if start[:1] == b"[":
        return start[1:].lstrip()[:1] == b"{"
    return start[:1] == b"{" and start.partition(b"\n")[2].lstrip()[:1] == b"{"


def _by_split(written: Any) -> Mapping[str, list[str]]:
    """`data_files` of a card in any of its spellings."""
    if isinstance(written, str):
        return {TRAIN: [written]}
    if isinstance(written, list) and all(isinstance(item, str) for item in written):
        return {TRAIN: list(written)}
    splits: dict[str, list[str]] = {}
    for item in written if isinstance(written, list) else []:
        if isinstance(item, dict) and isinstance(item.get("split"), str):
            paths = item.get("path", [])
            splits[item["split"]] = [paths] if isinstance(paths, str) else [str(path) for path in paths]
    return splits


def _globbed(folder: Path, globs: Sequence[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for text in globs:
        if "://" not in text and not Path(text).is_absolute() and ".." not in Path(text).parts:
            found |= dict.fromkeys(path for path in folder.glob(text) if path.is_file())
    return sorted(found)


def _card(file: Path) -> Sequence[Any]:
    """`configs` in front of a README; nothing where it has none."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        with opened(file) as stream:
            parts = stream.read().decode("utf-8-sig").replace("\r\n", "\n").split("---\n", 2)
        if len(parts) == 3 and not parts[0].strip():
            head = yaml.safe_load(parts[1])
            if isinstance(head, dict) and isinstance(head.get("configs"), list):
                return head["configs"]
    return ()


def _few(names: Iterable[Path]) -> str:
    named = [str(name) for name in names]
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def _count(files: int) -> str:
    return f"{files:,} file" + ("s" if files != 1 else "")
