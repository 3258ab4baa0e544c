"""Words of all code: names in backticks exist, docstrings read alone, files and classes are nouns.

Everything that a text refers to exists: verbs and options, config keys, `[Note: ...]` essays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sources import PATHS, outline, source
from tests.unit.test_cli_surface import SURFACE
from zerodrift.config import deepspeed, fields
from zerodrift.config.deepspeed import ENTRIES
from zerodrift.config.schema import Config
from zerodrift.train.job import Job

ROOT = Path(__file__).parents[2]
ALL = [*PATHS, *sorted(path for name in ("bench", "tools", "tests") for path in (ROOT / name).rglob("*.py"))]
FIRST = re.compile(r"(Of|In|With|That|Those|Whose|What|Where|As)\b")
PARTICIPLES = {
    *("absent", "apart", "asked", "attached", "during", "found", "given", "gone", "known", "looked", "made"),
    *("noted", "seen", "sent", "shown", "taken", "told", "unlike", "wanted", "written"),
}
FILE = re.compile(r"`([\w./-]+\.(?:py|cpp|h))`")
NAME = re.compile(r"`((?:[\w]+\.)*_?(?:[A-Z][a-z0-9]+[A-Z]\w*|[a-z]+_\w+))(?:\(\))?`")
OF_OTHERS = {
    *("Conv1D", "LabelSmoother", "LambdaLR", "ModuleDict", "ModuleList", "MultiheadAttention"),
    *("create_graph", "gate_proj", "gate_up_proj", "huggingface_hub", "out_proj", "process_group_backend"),
    *("record_stream", "start_method"),
}
"""Names of torch, transformers and Lightning that no code of ours uses."""
OF_USERS = {
    *("test.py", "train.py", "setup.py", "zero_to_fp32.py", "sitecustomize.py", "model.py", "script.py"),
    "loop.py",
}
"""Files that texts name and that are not of this repository."""


def test_a_docstring_can_be_read_alone() -> None:
    wrong = [
        f"{path}:{line}: {text.strip().splitlines()[0]}"
        for path in ALL
        for line, _, text in outline(path).docstrings
        if FIRST.match(text.strip())
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_classes_are_nouns() -> None:
    classes = [
        f"{path}: {name}"
        for path in ALL
        for name in outline(path).classes
        if name.lower().lstrip("_") in PARTICIPLES
    ]
    assert not classes + [path for path in ALL if path.stem.removeprefix("test_") in PARTICIPLES]
    assert not [path for path in PATHS if path.stem in ("utils", "helpers", "common", "misc")]


def words_in_code(path: Path) -> set[str]:
    """Return the words of a source without its docstrings and comments."""
    lines = source(path).splitlines()
    for first, last, _ in outline(path).docstrings:
        lines[first - 1 : last] = [""] * (last - first + 1)
    return set(re.findall(r"\w+", re.sub(r"#.*", "", "\n".join(lines))))


def test_names_in_backticks_exist() -> None:
    """A name of ours must be in some code, a file in the repository."""
    folders = [ROOT / name for name in ("src", "tests", "tools", "bench", "examples")]
    found = (path for folder in folders for path in folder.rglob("*"))
    files = [*ROOT.glob("*.py"), *(path for path in found if path.suffix in (".py", ".cpp", ".h"))]
    places = {
        str(path.relative_to(base)) for path in files for base in path.parents if base.is_relative_to(ROOT)
    }
    code = {word for path in PATHS for word in words_in_code(path)}
    code |= {key.rpartition(".")[2] for key in ENTRIES} | OF_OTHERS
    wider = code.union(*(words_in_code(path) for path in ALL if path not in PATHS))
    lost = []
    for path in ALL:
        texts = [text for *_, text in outline(path).docstrings]
        for text in texts + re.findall(r"#.*", source(path)):
            lost += [(path, name) for name in FILE.findall(text) if name not in places | OF_USERS]
            names = code if path in PATHS else wider
            lost += [(path, name) for name in NAME.findall(text) if name.rpartition(".")[2] not in names]
    assert not lost, "\n".join(f"{path}: `{name}`" for path, name in lost)


# --- what texts cite --------------------------------------------------------------------------------------


VERB = re.compile(r"(?:^\s*(?:\$ |> )?|`|-m )zerodrift ([a-z]+)([^`\n]*)")
BLOCKS = ("precision", "sharding", "pipeline", "zero_optimization", "torch_autocast", "data_types")
KEY = re.compile(rf"`((?:{'|'.join((*BLOCKS, 'bf16', 'fp16'))})(?:\.[a-z_0-9]+(?:\[\])?)+)(?=[`:=])")
JOB_KEY = re.compile(r"`((?:run|data|model|audit)\.[a-z_0-9]+(?:\.[a-z_]+)?)(?=[`:=])")


def texts(*folders: str) -> Iterator[tuple[str, str]]:
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    files += [file for folder in folders for file in sorted((ROOT / folder).rglob("*"))]
    for file in files:
        if file.suffix in ("", ".py", ".md", ".yaml", ".h", ".cpp") and file.is_file():
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def wrong_verbs(text: str) -> list[str]:
    """Return the verbs and options that the command line does not have."""
    found = []
    # A string may go on in the next line of a source, and a command on a page.
    for line in re.sub(r'"\s*\n\s*f?"|\\\n\s*', "", text).splitlines():
        for verb, rest in VERB.findall(line):
            if verb not in SURFACE:
                found.append(verb)
                continue
            options = re.findall(r"(?<!\S)(--[a-z][a-z-]*)", rest.partition("#")[0].partition(" -- ")[0])
            found += [f"{verb} {option}" for option in options if option not in SURFACE[verb]]
    return found


PROSE = {"is", "as", "does", "takes", "refuses", "import", "said", "has", "downloads", "checkpoint"}
"""Words after the name in sentences that begin with it, and in Python statements."""


def test_every_verb_and_option_exists() -> None:
    for name, text in texts("src", "docs", "examples"):
        found = [each for each in wrong_verbs(text) if each not in PROSE]
        assert not found, f"{name} names {found}"


@pytest.mark.parametrize(
    "text", ["`zerodrift bench` times", "  zerodrift plan c.yaml --loud", "`zerodrift advise`"]
)
def test_what_does_not_exist_is_seen(text: str) -> None:
    assert wrong_verbs(text)


def keys() -> set[str]:
    ours = {key.path for key in fields.every_key(Config)}
    theirs = {key.removesuffix(".*") for key in deepspeed.ENTRIES}
    known = {*ours, *theirs, *(f"{key}[]" for key in ours)}
    return {*known, *(key.replace("[]", "") for key in known)}


def named_in(text: str) -> set[str]:
    """Return the config keys in a text, without files."""
    found = {key for key in KEY.findall(text) if deepspeed.find(key) is None}
    return {key for key in found if not key.endswith((".json", ".yaml", ".py"))}


def test_every_key_exists() -> None:
    known = keys()
    for name, text in texts("src", "docs", "examples"):
        assert not named_in(text) - known, f"{name} names {named_in(text) - known}"
    known = {key for path in fields.every_key(Job) for key in (path.path, path.path.rpartition(".")[0])}
    for name in ("train.md", "job.md", "recipes.md", "errors.md"):
        found = set(JOB_KEY.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))) - known
        assert not found, f"{name} names {found}"


MARKS = re.compile(r"^[ \t]*(?://+|#+|\*+)", re.MULTILINE)
HOME = re.compile(r'(?:^|\n\s*\n|""")\s*\[Note: ([^\]]+)\]')
CITED = re.compile(r"\[Note: ([^\]]+)\]")


def test_every_essay_that_is_cited_exists() -> None:
    sources = [
        (name, text)
        for name, text in texts("src", "bench", "tests")
        if name.startswith(("src", "bench", "tests"))
    ]
    written = {" ".join(note.split()) for _, text in sources for note in HOME.findall(MARKS.sub("", text))}
    assert "roots" in written
    for name, text in sources:
        if name == str(Path(__file__).relative_to(ROOT)):
            continue
        lost = {" ".join(note.split()) for note in CITED.findall(text)} - written
        assert not lost, f"{name} cites {lost}"
