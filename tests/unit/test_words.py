"""Words of the source: names in backticks exist, docstrings read alone, files and classes are nouns."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_layers import PACKAGE
from zerodrift.config.deepspeed import ENTRIES

ROOT = Path(__file__).parents[2]
FIRST = re.compile(r"(Of|In|With|That|Those|Whose|What|Where|As)\b")
PARTICIPLES = {
    *(
        "absent",
        "apart",
        "asked",
        "attached",
        "during",
        "found",
        "given",
        "gone",
        "known",
        "looked",
        "made",
        "noted",
    ),
    *("seen", "sent", "shown", "taken", "told", "unlike", "wanted", "written"),
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
    "test.py",
    "train.py",
    "setup.py",
    "zero_to_fp32.py",
    "sitecustomize.py",
    "model.py",
    "script.py",
    "loop.py",
}
"""Files that texts name and that are not of this repository."""


@functools.cache
def sources() -> dict[Path, str]:
    files = [
        path for path in sorted(PACKAGE.rglob("*.py")) if not {"docs", "examples"} & set(path.parts[-4:-1])
    ]
    return {path: path.read_text() for path in files if "examples" not in path.parts}


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string that stands for itself, fields' docstrings among them."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def test_a_docstring_can_be_read_alone() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.strip().splitlines()[0]}"
        for path, source in sources().items()
        for line, text in docstrings(ast.parse(source))
        if FIRST.match(text.strip())
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_classes_are_nouns() -> None:
    named = [
        *(str(path.relative_to(PACKAGE)) for path in sources() if path.stem in PARTICIPLES),
        *(
            f"{path.relative_to(PACKAGE)}: {node.name}"
            for path, source in sources().items()
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ClassDef) and node.name.lower().lstrip("_") in PARTICIPLES
        ),
    ]
    assert not named


def words_in_code(source: str) -> Iterator[str]:
    """Yield the names, and the words of strings that are no docstrings."""
    texts = {text for _, text in docstrings(ast.parse(source))}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string
        elif token.type == tokenize.STRING and token.string.strip("rbfu\"'") not in texts:
            yield from re.findall(r"\w+", token.string) if '"""' not in token.string else ()


def comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    yield from (text for _, text in docstrings(ast.parse(source)))


def test_names_in_backticks_exist() -> None:
    """A name of ours must be in some code, a file in the repository."""
    folders = [ROOT / name for name in ("src", "tests", "tools", "bench", "examples")]
    found = (path for folder in folders for path in folder.rglob("*"))
    files = [*ROOT.glob("*.py"), *(path for path in found if path.suffix in (".py", ".cpp", ".h"))]
    places = {
        str(path.relative_to(base)) for path in files for base in path.parents if base.is_relative_to(ROOT)
    }
    code = {word for source in sources().values() for word in words_in_code(source)}
    code |= {key.rpartition(".")[2] for key in ENTRIES}
    lost = []
    for path, source in sources().items():
        for text in comments(source):
            lost += [(path, name) for name in FILE.findall(text) if name not in places | OF_USERS]
            lost += [
                (path, name) for name in NAME.findall(text) if name.rpartition(".")[2] not in code | OF_OTHERS
            ]
    assert not lost, "\n".join(f"{path.relative_to(PACKAGE)}: `{name}`" for path, name in lost)
