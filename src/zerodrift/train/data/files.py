"""Find the files that a key of a job names: by path, by glob, in a folder, or by a name of the hub.

A folder may be a published data set: files of rows in several splits, beside a README, a licence and an
index. Then one split is read, and the files that are left out are reported. A folder is refused if it is
unclear which of its files are data. Files come sorted by path.

Models and data sets of the Hugging Face hub are found in the local cache; nothing is downloaded. An existing
path comes before a name of the hub.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from zerodrift.errors import ConfigError, Problems, first_line, nearest_path, several
from zerodrift.files import kind, opened
from zerodrift.train.data.formats import OF_ROWS, readable, suffix_of
from zerodrift.train.job import Data, DataSet, Job

TOKEN_SUFFIXES = (".npy", ".bin")
TEXTS = (
    *(".txt", ".md", ".rst", ".text", ".html", ".tex"),
    *(".py", ".c", ".h", ".cpp", ".cc", ".hpp", ".cu", ".rs", ".go", ".js", ".ts", ".java", ".sh"),
)
_ALSO_TEXTS = (".json", ".csv", ".tsv", ".jsonl", ".ndjson")
"""Suffixes of rows that count as texts with `data.format: files`."""
TRAIN, VALIDATION = "train", "validation"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words for splits in names of files and folders, as `datasets` knows them."""
_SPLIT = re.compile(rf"(?:^|[-._ /0-9])({'|'.join(SPLITS)})(?=$|[-._ /0-9])")
_PAPERS = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct|dataset_?card)\b.*"
    r"|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)
"""Files in a folder of data that are not data."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a key, sorted and each once."""

    files: tuple[Path, ...] = ()
    left: tuple[str, ...] = ()
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
            found, must = DataFiles(), f"must name existing files ({first_line(error)[-80:]})"
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
    must = f"must name files, not {other}" if other else "must name existing files"
    return DataFiles(tuple(file for file in files if file.is_file())), must


class _Folder:
    """A folder, and which of its files are data."""

    def __init__(self, folder: Path, where: str) -> None:
        self._folder, self._where = folder, where
        # Folders of runs and caches, which training wrote, are not data.
        plans = [path.parent for path in folder.rglob("plan.json")]
        runs = {place for place in plans if (place / "job.json").is_file()}
        caches = {path.parent for path in folder.rglob("digests.json")}
        self._written = (runs | caches) - {folder}

    def files(self, pattern: str) -> list[Path]:
        return sorted(
            path
            for path in self._folder.rglob(pattern or "*")
            if path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(self._folder).parts)
            and self._written.isdisjoint(path.parents)
        )

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._folder))

    def data(self, split: str, whole: bool) -> DataFiles:
        """Return the data files of a split; with `whole` each file is a text, whatever its name."""
        files = self.files("")
        if whole:
            found = _texts(files, *_ALSO_TEXTS)
        elif by_split := self._of_card() or self._of_dict():
            only = tuple(next(iter(by_split.values())))
            found = DataFiles(only) if len(by_split) == 1 else self._chosen(by_split, split)
        else:
            found = self._guessed(files, split)
        rest = sorted({*files} - {*found.files} - {*found.others})
        left = [self._name(file) for file in rest]
        if len(rest) > 4:
            suffixes = Counter(file.suffix or "no suffix" for file in rest).most_common(5)
            left = [f"{len(rest):,} other files ({', '.join(suffix for suffix, _ in suffixes)})"]
        left += [f"{self._name(path)}, which training wrote" for path in sorted(self._written)]
        return DataFiles(tuple(sorted(found.files)), (*found.left, *left))

    def _guessed(self, files: Sequence[Path], split: str) -> DataFiles:
        """Choose data files by their names and by what lies beside them."""
        papers = [file for file in files if _PAPERS.fullmatch(file.name)]
        others = [file for file in files if file not in papers and file.name != f"{self._folder.name}.py"]
        texts = [file for file in others if suffix_of(file) in TEXTS]
        rows = [file for file in others if suffix_of(file) in OF_ROWS]
        rows += [file for file in others if suffix_of(file) == ".json" and (not texts or _holds_rows(file))]
        if rows and texts:
            names, more = (", ".join(map(self._name, named[:3])) for named in (rows, texts))
            must = "must name folders of rows or of texts, and not of both"
            todo = "Set `data.pattern`, or `data.format: files` to read each file as a text."
            raise ConfigError(self._where, must, got=f"{self._folder} with {names} and {more}", do=todo)
        # Only plain texts are split by their names: a `test.py` is a program.
        tops = {split_of(Path(self._name(file)).parts[0]) for file in texts}
        are_plain = all(suffix_of(file) in (".txt", ".text") for file in texts)
        chosen = rows
        if texts:
            if not (are_plain and TRAIN in tops and len(tops - {""}) > 1):
                return _texts(files)  # a README among them is one
            chosen = texts
        chosen = chosen or [file for file in others if file.suffix.lower() in TOKEN_SUFFIXES]
        if not chosen:
            return _texts(papers, *_ALSO_TEXTS)
        by_split: dict[str, list[Path]] = {}
        for file in chosen:
            by_split.setdefault(split_of(self._name(file)), []).append(file)
        has_splits = len(by_split.keys() - {""}) > 1
        return self._chosen(by_split, split) if has_splits else DataFiles(tuple(chosen))

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

    def _of_dict(self) -> dict[str, list[Path]]:
        """Return the files of each split by the list that `datasets` saves to disk."""
        with contextlib.suppress(OSError, ValueError), opened(self._folder / "dataset_dict.json") as stream:
            names = json.loads(stream.read())["splits"]
            found = {SPLITS.get(name, name): sorted((self._folder / name).rglob("*.arrow")) for name in names}
            return {name: files for name, files in found.items() if files}
        return {}

    def _of_card(self) -> dict[str, list[Path]]:
        """Return the files of each split by the head of a README."""
        head: Any = None
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            with opened(self._folder / "README.md") as stream:
                parts = stream.read().decode("utf-8-sig").replace("\r\n", "\n").split("---\n", 2)
            head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
        configs = head.get("configs") if isinstance(head, dict) else None
        subsets = {
            str(block.get("config_name", "default")): block["data_files"]
            for block in (configs if isinstance(configs, list) else ())
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
        written = subsets[name]
        # `data_files` is a glob, several, or a list of blocks with `split` and `path`.
        for item in written if isinstance(written, list) else [written]:
            is_block = isinstance(item, dict)
            key, globs = (item.get("split"), item.get("path", [])) if is_block else (TRAIN, item)
            if not isinstance(key, str):
                continue
            texts = map(str, [globs] if isinstance(globs, str) else globs)
            inside = [text for text in texts if not Path(text).is_absolute() and ".." not in Path(text).parts]
            found = {path for text in inside for path in self._folder.glob(text) if path.is_file()}
            by_split.setdefault(SPLITS.get(key.lower(), key), []).extend(sorted(found))
        return {name: files for name, files in by_split.items() if files}


def _texts(files: Iterable[Path], *more: str) -> DataFiles:
    return DataFiles(tuple(file for file in files if suffix_of(file) in (*TEXTS, *more)))


def split_of(path: str) -> str:
    """Return the split in the name of a path inside a folder; empty if it names none."""
    found = _SPLIT.findall(path.lower())
    return SPLITS[found[-1]] if found else ""


def _holds_rows(file: Path) -> bool:
    """Return True if JSON beside texts is an array of objects or has several lines of them: data, not
    settings."""
    with readable(file), opened(file) as stream:
        start = stream.read(1 << 16).lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    if start[:1] == b"[":
        return start[1:].lstrip()[:1] == b"{"
    return start[:1] == b"{" and start.partition(b"\n")[2].lstrip()[:1] == b"{"


# --- names of the hub ---------------------------------------------------------------------------------------


Kind = Literal["model", "dataset"]
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_LONGEST = 96
_SNAPSHOT = re.compile(r"(model|dataset)s--(.+)")


def from_cache(job: Job) -> Job:
    """Return a job with the cached folders in place of hub names."""
    data, model = job.data, job.model
    tokenizer = data.tokenizer
    found = {
        "train": _data_from_cache(data.train),
        "validation": _data_from_cache(data.validation),
        "tokenizer": tokenizer if tokenizer in ("auto", "bytes") else path_of(tokenizer, "model"),
    }
    source = {"source": path_of(model.source, "model")}
    return job.model_copy(
        update={"model": model.model_copy(update=source), "data": data.model_copy(update=found)}
    )


def _data_from_cache(written: Any) -> Any:
    if isinstance(written, str):
        return path_of(written, "dataset")
    if isinstance(written, DataSet):
        return written.model_copy(update={"path": _data_from_cache(written.path)})
    return tuple(map(_data_from_cache, written)) if isinstance(written, tuple) else written


def path_of(written: str, kind: Kind) -> str:
    """Return the cached folder of a name, or whatever else is written as it is."""
    if not is_name(written):
        return written
    found = _snapshot(hub_cache() / f"{kind}s--{written.replace('/', '--')}")
    return written if found is None else str(found)


def is_name(text: str) -> bool:
    """Return True if a text has the form of a hub name and is no path here."""
    fits = len(text) <= _LONGEST and _NAME.fullmatch(text) and ".." not in text and "--" not in text
    return bool(fits) and not Path(text).exists()


def _snapshot(folder: Path) -> Path | None:
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        snapshot = folder / "snapshots" / commit
        return snapshot if commit and snapshot.is_dir() else None
    except (OSError, ValueError):
        pass
    try:
        found = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def hub_cache() -> Path:
    """Return the folder that `huggingface_hub` downloads to."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def name_in_cache(path: str | Path) -> tuple[Kind, str] | None:
    """Return the kind and hub name of a snapshot in the cache; None for any other path."""
    whole = Path(path)
    found = _SNAPSHOT.fullmatch(whole.parent.parent.name) if whole.parent.name == "snapshots" else None
    if found is None:
        return None
    return "model" if found[1] == "model" else "dataset", found[2].replace("--", "/", 1)


def advice(name: str, kind: Kind) -> str:
    """Return the advice for a missing path: a name beside it, or to download it if it can be a hub name."""
    if near := nearest_path(name):
        return near
    if "/" not in name or not is_name(name) or Path(name.partition("/")[0]).is_dir():
        return ""
    what = "--repo-type dataset " if kind == "dataset" else ""
    return f"Run `hf download {what}{name}` if it is one of the hub."


def cached_names(job: Job) -> Iterator[str]:
    """Yield a line for each name of a job that is read from the cache."""
    held = job.data.validation
    others = () if isinstance(held, float) else (held,) if isinstance(held, str) else held
    for path in dict.fromkeys((job.model.source, job.data.tokenizer, *job.data.paths, *others)):
        if found := name_in_cache(path):
            yield f"{found[0]} {found[1]} is read from the local cache: {path}"
