"""Words of all code: names in backticks exist, docstrings read alone, files and classes are nouns."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.unit.sources import PATHS, docstrings, nodes, source
from zerodrift.config.deepspeed import ENTRIES

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
        for line, text in docstrings(path)
        if FIRST.match(text.strip())
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_classes_are_nouns() -> None:
    classes = [
        f"{path}: {node.name}"
        for path in ALL
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and node.name.lower().lstrip("_") in PARTICIPLES
    ]
    assert not classes + [path for path in ALL if path.stem.removeprefix("test_") in PARTICIPLES]
    assert not [path for path in PATHS if path.stem in ("utils", "helpers", "common", "misc")]


def words_in_code(path: Path) -> set[str]:
    """Return the words of a source without its docstrings and comments."""
    lines = source(path).splitlines()
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
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
    code = set().union(*map(words_in_code, PATHS))
    code |= {key.rpartition(".")[2] for key in ENTRIES} | OF_OTHERS
    wider = code.union(*(words_in_code(path) for path in ALL if path not in PATHS))
    lost = []
    for path in ALL:
        texts = [text for _, text in docstrings(path)]
        for text in texts + re.findall(r"#.*", source(path)):
            lost += [(path, name) for name in FILE.findall(text) if name not in places | OF_USERS]
            names = code if path in PATHS else wider
            lost += [(path, name) for name in NAME.findall(text) if name.rpartition(".")[2] not in names]
    assert not lost, "\n".join(f"{path}: `{name}`" for path, name in lost)
