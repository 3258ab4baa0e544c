"""Find the files that a key of a job names: by path, by glob, or in a folder.

A folder may be a published data set: files of rows in several splits, beside a README, a licence and a list
of what is where. Then one split is read, and the report says what is left out. A folder that does not show
which files are data is refused.

Every file of a folder is read, named as left out, or the folder is refused. Files come sorted by path.
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

from zerodrift.errors import ConfigError, Problems, first_line, several
from zerodrift.files import kind, opened
from zerodrift.train.data.formats import OF_ROWS, readable, suffix_of
from zerodrift.train.data.hub import advice
from zerodrift.train.job import Data

TOKEN_SUFFIXES = (".npy", ".bin")
TEXTS = (
    *(".txt", ".md", ".rst", ".text", ".html", ".tex"),
    *(".py", ".c", ".h", ".cpp", ".cc", ".hpp", ".cu", ".rs", ".go", ".js", ".ts", ".java", ".sh"),
)
_ALSO_TEXTS = (".json", ".csv", ".tsv", ".jsonl", ".ndjson")
"""Suffixes of rows that count as texts with `data.format: files`."""
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
"""Words for splits in names of files and folders, as `datasets` knows them."""
_SPLIT = re.compile(rf"(?:^|[-._ /0-9])({'|'.join(SPLITS)})(?=$|[-._ /0-9])")
_PAPERS = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct|dataset_?card)\b.*"
    r"|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)
"""Files beside data that are none."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a key, sorted and each once."""

    files: tuple[Path, ...] = ()
    left: tuple[str, ...] = ()
    """Other files in the folders, in words."""
    others: tuple[Path, ...] = ()
    """Files of other splits, which `left` mentions."""


def find(written: str | Sequence[str], data: Data, where: str, split: str = TRAIN) -> DataFiles:
    """Return the files that a key names; the files of `split` in a folder of several splits."""
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
            found, must = DataFiles(), f"must name files that are there ({first_line(error)[-80:]})"
        if not found.files:
            there = f", with {', '.join(found.left)}" if found.left else ""
            here = f" (looked for in {Path.cwd()})" if not there and text[:1] not in ("/", "~") else ""
            problems.add(where, must, got=f"{text!r}{there}{here}", do=advice(text, "dataset"))
        paths |= dict.fromkeys(found.files)
        left += found.left
    problems.raise_as(ConfigError)
    once: dict[Path, Path] = {}
    for path in sorted(paths):
        if (first := once.setdefault(path.resolve(), path)) != path:
            left.append(f"{path}, which is {first}")
    return DataFiles(tuple(once.values()), tuple(left))


def _named(text: str, data: Data, split: str, where: str) -> tuple[DataFiles, str]:
    """Return the files of one path or glob, and the requirement that fails if there are none."""
    path = Path(text).expanduser()
    if path.is_dir():
        folder = _Folder(path, where)
        if data.pattern:
            matching = tuple(folder.files(data.pattern))
            return DataFiles(matching), f"must name folders with files that match {data.pattern!r}"
        return folder.data(split, data.format == "files"), "must name folders with files of a known kind"
    files = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    other = kind(path)
    must = f"must name files, not {other}" if other else "must name files that are there"
    return DataFiles(tuple(file for file in files if file.is_file())), must


class _Folder:
    """A folder, and which of its files are data."""

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
        """Folders of runs and caches: what training wrote is not its data."""
        plans = [path.parent for path in self._folder.rglob("plan.json")]
        runs = {folder for folder in plans if (folder / "job.json").is_file()}
        caches = {path.parent for path in self._folder.rglob("digests.json")}
        return frozenset((runs | caches) - {self._folder})

    def _inside(self, path: Path) -> Path:
        return path.relative_to(self._folder)

    def data(self, split: str, whole: bool) -> DataFiles:
        """Return the data files of a split; with `whole` each file is a text, whatever its name."""
        files = self.files("")
        if whole:
            found = _texts(files, *_ALSO_TEXTS)
        else:
            found = self._listed(split) or self._guessed(files, split)
        rest = sorted({*files} - {*found.files} - {*found.others})
        left = [str(self._inside(file)) for file in rest]
        if len(rest) > 4:
            suffixes = Counter(file.suffix or "no suffix" for file in rest).most_common(5)
            left = [f"{len(rest):,} other files ({', '.join(suffix for suffix, _ in suffixes)})"]
        left += [f"{self._inside(path)}, which training wrote" for path in sorted(self._written)]
        return DataFiles(tuple(sorted(found.files)), (*found.left, *left))

    def _guessed(self, files: Sequence[Path], split: str) -> DataFiles:
        """Choose data files by their names and by what lies beside them."""
        papers = [file for file in files if _PAPERS.fullmatch(file.name)]
        loader = f"{self._folder.name}.py"
        others = [file for file in files if file not in papers and file.name != loader]
        texts = [file for file in others if suffix_of(file) in TEXTS]
        rows = [file for file in others if suffix_of(file) in OF_ROWS]
        rows += [file for file in others if suffix_of(file) == ".json" and (not texts or _holds_rows(file))]
        if rows and texts:
            got = f"{self._folder} with {self._few(rows)} and {self._few(texts)}"
            todo = "Set `data.pattern`, or `data.format: files` to read each file as a text."
            raise ConfigError(
                self._where, "must name folders of rows or of texts, and not of both", got=got, do=todo
            )
        if rows or (texts and self._has_splits(texts)):
            return self._split(rows or texts, split)
        if texts:  # a README among them is one
            return _texts(files)
        token_maps = [file for file in others if file.suffix.lower() in TOKEN_SUFFIXES]
        return self._split(token_maps, split) if token_maps else _texts(papers, *_ALSO_TEXTS)

    def _few(self, files: Sequence[Path]) -> str:
        named = [str(self._inside(file)) for file in files]
        return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")

    def _has_splits(self, texts: Sequence[Path]) -> bool:
        """Return True if texts are plainly named after splits: a `test.py` is a program."""
        tops = {split_of(Path(self._inside(file).parts[0])) for file in texts}
        plain = all(suffix_of(file) in (".txt", ".text") for file in texts)
        return plain and TRAIN in tops and len(tops - {""}) > 1

    def _split(self, files: Sequence[Path], split: str) -> DataFiles:
        by_split: dict[str, list[Path]] = {}
        for file in files:
            by_split.setdefault(split_of(self._inside(file)), []).append(file)
        return DataFiles(tuple(files)) if len(by_split.keys() - {""}) < 2 else self._chosen(by_split, split)

    def _chosen(self, by_split: Mapping[str, Sequence[Path]], split: str) -> DataFiles:
        wanted = "test" if split == VALIDATION and split not in by_split else split
        if wanted not in by_split:
            must = f"must name files, or a folder with a split `{split}`"
            got = f"{self._folder} with {', '.join(f'`{name}`' for name in sorted(by_split) if name)}"
            raise ConfigError(self._where, must, got=got, do="Name the files.")
        others = {name: files for name, files in sorted(by_split.items()) if name != wanted}
        words = [
            f"{several(len(files), 'file')} of {f'the split `{name}`' if name else 'no split'}"
            for name, files in others.items()
        ]
        rest = tuple(file for files in others.values() for file in files)
        return DataFiles(tuple(by_split[wanted]), tuple(words), rest)

    def _listed(self, split: str) -> DataFiles | None:
        """Return the files of a split by the folder's card or list; None if there is none."""
        by_split = self._of_card() or self._of_dict()
        if len(by_split) < 2:
            return DataFiles(tuple(next(iter(by_split.values())))) if by_split else None
        return self._chosen(by_split, split)

    def _of_dict(self) -> dict[str, list[Path]]:
        """Read the list of splits that `datasets` saves to disk."""
        with contextlib.suppress(OSError, ValueError), opened(self._folder / "dataset_dict.json") as stream:
            names = json.loads(stream.read())["splits"]
            found = {SPLITS.get(name, name): sorted((self._folder / name).rglob("*.arrow")) for name in names}
            return {name: files for name, files in found.items() if files}
        return {}

    def _of_card(self) -> dict[str, list[Path]]:
        """Read the files of each split from the head of a README."""
        subsets = {
            str(block.get("config_name", "default")): block["data_files"]
            for block in _card(self._folder / "README.md")
            if isinstance(block, dict) and block.get("data_files")
        }
        if not subsets:
            return {}
        name = next(iter(subsets)) if len(subsets) == 1 else "default"
        if name not in subsets:
            got = f"{self._folder} with {', '.join(f'`{name}`' for name in subsets)}"
            todo = "Name files or a folder in it: its README.md says which are whose."
            raise ConfigError(self._where, "must name the files of one subset", got=got, do=todo)
        by_split: dict[str, list[Path]] = {}
        for key, globs in _globs_by_split(subsets[name]).items():
            if files := _globbed(self._folder, globs):
                by_split.setdefault(SPLITS.get(key.lower(), key), []).extend(files)
        return by_split


def _texts(files: Iterable[Path], *more: str) -> DataFiles:
    return DataFiles(tuple(file for file in files if suffix_of(file) in (*TEXTS, *more)))


def split_of(path: Path) -> str:
    """Return the split in the name of a path inside a folder; empty if it names none."""
    found = _SPLIT.findall(path.as_posix().lower())
    return SPLITS[found[-1]] if found else ""


def _holds_rows(file: Path) -> bool:
    """Return True if JSON beside texts is an array of objects or has several lines of them: data, not
    settings."""
    with readable(file), opened(file) as stream:
        start = stream.read(1 << 16).lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    if start[:1] == b"[":
        return start[1:].lstrip()[:1] == b"{"
    return start[:1] == b"{" and start.partition(b"\n")[2].lstrip()[:1] == b"{"


def _globs_by_split(written: Any) -> Mapping[str, list[str]]:
    """Return `data_files` of a card, in any of its spellings."""
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
    """Return the files of globs that stay inside a folder."""
    inside = [g for g in globs if "://" not in g and not Path(g).is_absolute() and ".." not in Path(g).parts]
    return sorted({path for text in inside for path in folder.glob(text) if path.is_file()})


def _card(file: Path) -> Sequence[Any]:
    """Return `configs` of the head of a README; empty if it has none."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        with opened(file) as stream:
            parts = stream.read().decode("utf-8-sig").replace("\r\n", "\n").split("---\n", 2)
        if len(parts) == 3 and not parts[0].strip():
            head = yaml.safe_load(parts[1])
            if isinstance(head, dict) and isinstance(head.get("configs"), list):
                return head["configs"]
    return ()
