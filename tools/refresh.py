"""Write the generated parts of README.md and docs: key tables, support, the API, output of commands, figures.

    python tools/refresh.py            # or: make docs

A block of language `console` whose first line is `$ zerodrift ...` gets what that command prints. A comment
right above the block, `<!-- shown: until decisions -->`, shows a part of it: `from WORD` starts at the first
line that begins with WORD, `until WORD` stops before it. Nobody edits such a block by hand, and
`tests/unit/test_docs.py` fails where one is stale. Figures of benchmarks, and their pictures, are those of
`bench/results`, by `bench/benchmarks.py`.

Invariant: a second run changes nothing.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import zerodrift
from zerodrift.cli import app
from zerodrift.faces import homes_of
from zerodrift.policy.support import states, table
from zerodrift.report.support import support_markdown

sys.path += [str(Path(__file__).resolve().parents[1] / "bench"), str(Path(__file__).resolve().parent)]
import benchmarks
import formats_page
from claims import Results
from columns_picture import columns_picture
from config_page import render_config, render_page
from job_page import render_job

ROOT = Path(__file__).resolve().parents[1]

BLOCK = re.compile(
    r"(?P<head>(?:<!-- shown: (?P<part>[^\n]*?) -->\n)?```console\n\$ (?P<command>zerodrift [^\n]*)\n)"
    r"(?P<output>.*?)```\n",
    re.DOTALL,
)


def pages() -> list[Path]:
    """Return every page of the repository that a person wrote."""
    written = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
    return sorted(page for page in written if page.name not in generated())


def generated() -> dict[str, str]:
    """Return the text of each page in docs that is generated as a whole, by name."""
    return {
        "api.md": render_api(),
        "config.md": around("config.md", render_config(), "\n## What `auto` means"),
        "job.md": render_job(),
        "deepspeed.md": around("deepspeed.md", render_page(), "\n## Where DeepSpeed"),
        "support.md": around("support.md", support_markdown(table(), states()), "\n## Tested versions"),
    }


def around(name: str, tables: str, behind: str = "") -> str:
    """Put fresh tables into a page, between its hand-written start and the heading `behind`."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    before = text[: text.index(tables.partition("\n")[0])]
    return before + tables + (text[text.index(behind) :] if behind else "")


def fresh(text: str) -> str:
    """Return a page with fresh output of its commands, figures and tables of formats."""
    return formats_page.fresh(benchmarks.refresh(BLOCK.sub(_fresh_block, text), Results()))


def pictures() -> dict[str, str]:
    """Return the text of each generated picture in docs/img, by name."""
    plan = zerodrift.make_plan(
        ROOT / "examples/moe-pinned.yaml", ROOT / "examples/qwen3-moe-tiny", world_size=2
    )
    rows = {
        "model.layers.0.mlp.experts.down_proj": "an expert's weights, mode bf16",
        "model.layers.0.mlp.gate.weight": "the router, pinned to fp32 by one rule",
    }
    return {**benchmarks.plot_files(Results()), "columns.svg": columns_picture(plan, rows)}


TRACED_WITH = {"torch": "2.13.0", "transformers": "5.23.0"}
"""Versions whose operations and lines the traces show; other versions leave the traces alone."""


def _fresh_block(found: re.Match[str]) -> str:
    versions = {name: metadata.version(name).partition("+")[0] for name in TRACED_WITH}
    if "--trace" in found["command"] and versions != TRACED_WITH:
        return found[0]
    if found["command"].startswith("zerodrift check "):
        # Starts a training, so docs/check.md has what it prints, and tests/e2e/test_check.py compares that.
        whole = (
            (ROOT / "docs" / "check.md")
            .read_text(encoding="utf-8")
            .partition(f"$ {found['command']}\n")[2]
            .partition("```")[0]
        )
        return f"{found['head']}{part(whole, found['part'])}```\n" if found["part"] else found[0]
    return f"{found['head']}{part(output(found['command']), found['part'] or '')}```\n"


def output(command: str) -> str:
    """Return the output of a command, run in this process because importing transformers takes long."""
    printed = io.StringIO()
    words = shlex.split(command, comments=True)[1:]
    os.environ["COLUMNS"] = "80" if {"--trace", "--simulate"} & {*words} else "100"
    # Paths in commands are those of a person at the root of the repository.
    with _at_root(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        app(words, standalone_mode=False)
    return printed.getvalue()


@contextlib.contextmanager
def _at_root() -> Iterator[None]:
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


def part(text: str, shown: str) -> str:
    """Return the lines that `from WORD until WORD` names."""
    lines = text.splitlines()
    words = shlex.split(shown)
    for keyword, word in zip(words[::2], words[1::2], strict=True):
        place = next(number for number, line in enumerate(lines) if line.startswith(word))
        lines = lines[place:] if keyword == "from" else lines[:place]
    return "\n".join(lines).rstrip() + "\n"


# --- the API page ---------------------------------------------------------------------------------------

API_INTRO = """\
<!-- Generated by `tools/refresh.py` from signatures and docstrings. Edit those. -->

# What can Python code call?

The public names of `import zerodrift`. Nothing else in the package is public.

```python
import torch
import zerodrift as zd

config = {"precision": {"mode": "bf16"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
engine = zd.initialize(torch.nn.Linear(16, 1), config=config, device="cpu", quiet=True)
engine.backward(engine(torch.randn(8, 16)).float().square().mean())
print(engine.step().grad_norm)
engine.destroy()
```"""

CONFIG_INTRO = """\
Each block of a config is a class. Editors complete its fields, type checkers check them, and a wrong field is
a `ConfigError`. Objects, dicts and files mean the same, and mix:

```python
import zerodrift as zd

config = zd.Config(
    precision=zd.Precision(mode="bf16", rules=[zd.Rule(match="*.router.*", pin="fp32")]),
    zero_optimization=zd.ZeroOptimization(stage=3),
    optimizer=zd.Optimizer(type="AdamW", params={"lr": 3e-4}),
)
policy = zd.resolve(config, zd.MeshShape(shard=4))
```

[Config keys](config.md) lists the fields of each class and what they allow. `Rule.class_` is the key
`class`."""

API_SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Training", "", ("api", "engine.engine", "engine.values", "engine.executor", "engine.progress")),
    ("Pipelines", "", ("pipeline.cut",)),
    (
        "Checkpoints and weights",
        "",
        ("checkpoint.checkpoints", "weights.exporter", "weights.load"),
    ),
    (
        "Planning",
        "",
        ("config.loader", "policy.resolver", "model.sources", "plan.builder", "plan.bill", "plan.table"),
    ),
    ("Observing", "", ("inspect.check.launch",)),
    ("What precision costs", "", ("inspect.audit.entry", "inspect.audit.report")),
    ("What a plan is made of", "", ("mesh", "model.spec", "policy.decisions")),
    ("Configs", CONFIG_INTRO, ("config.schema",)),
    ("Errors", "", ("errors",)),
)
"""Title, text, and the files whose public names are below it."""

NOT_FOR_USERS = frozenset(
    {
        *(
            "require_open",
            "end_step",
            "abandon_step",
            "pieces",
            "sync_storage",
            "updater",
            "values",
        ),  # for the rest of the engine
        *("check", "abandon", "load_parts", "finish"),  # for the engine and `zerodrift train`
    }
)


MADE_BY_USERS = ("Checkpoints", "MeshShape", "Parts")
"""Classes whose constructor is for users; objects of the others come from a call."""


def render_api() -> str:
    """Return the text of `docs/api.md`."""
    homes = {
        name: home.removeprefix("zerodrift.")
        for name, home in homes_of(Path(zerodrift.__file__).read_bytes()).items()
    }
    assert set(homes.values()) == {home for _, _, files in API_SECTIONS for home in files}
    parts = [API_INTRO]
    for title, text, files in API_SECTIONS:
        parts += [f"## {title}", text] if text else [f"## {title}"]
        names = [name for name in zerodrift.__all__ if homes[name] in files]
        names.sort(key=lambda name: (files.index(homes[name]), name))
        if files in (("config.schema",), ("errors",)):
            rows = [f"| `{name}` | {_doc(getattr(zerodrift, name), short=True)} |" for name in names]
            parts.append("\n".join(["| class | what it is |", "| --- | --- |", *rows]))
        else:
            parts += [part for name in names for part in _entry(name, getattr(zerodrift, name))]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    """Yield one public name: signature, docstring, and for a class its fields and methods."""
    yield f"### `{name}`"
    if not inspect.isclass(value):
        yield _signature(name, value)
        yield _doc(value)
        return
    if name in MADE_BY_USERS:
        yield _signature(name, value)
    yield _doc(value)
    rows = [f"| `{field}` | {kind} | {doc} |" for field, kind, doc in _fields(value)]
    for member, found in vars(value).items():
        if not _is_property(found) or member.startswith("_") or member in NOT_FOR_USERS:
            continue
        getter = found.fget if isinstance(found, property) else found.func
        if getter.__doc__:
            rows.append(
                f"| `{member}` | {_kind(getter.__annotations__['return'])} | {_doc(getter, short=True)} |"
            )
    if rows:
        yield "\n".join(["| attribute | type | what it is |", "| --- | --- | --- |", *rows])
    for member, found in vars(value).items():
        method = getattr(found, "__func__", found)
        public = not member.startswith("_") or member == "__call__"
        if inspect.isfunction(method) and public and method.__doc__ and member not in NOT_FOR_USERS:
            instance = {"ParameterHandle": "parameter"}.get(
                name, "engine" if name == "Engine" else name.lower()
            )
            if isinstance(found, (staticmethod, classmethod)):
                instance = name
            call = instance if member == "__call__" else f"{instance}.{member}"
            yield _signature(call, method, bound=not isinstance(found, staticmethod))
            yield _doc(method)


def _is_property(found: Any) -> bool:
    return isinstance(found, (property, functools.cached_property))


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield the fields of a dataclass that have a docstring, or a type that says enough."""
    if not dataclasses.is_dataclass(kind):
        return
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for node, behind in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        said = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
        doc = " ".join(str(behind.value.value).split()) if said else ""  # type: ignore[union-attr]
        yield node.target.id, _kind(ast.unparse(node.annotation)), doc.replace("|", "\\|")


def _kind(annotation: str) -> str:
    return "`" + annotation.replace("|", "\\|") + "`"


def _signature(name: str, function: Any, bound: bool = False) -> str:
    """Return a signature, on several lines if it is long."""
    found = inspect.signature(function)
    texts: list[str] = []
    for parameter in list(found.parameters.values())[1 if bound else 0 :]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "..." if callable(parameter.default) else repr(parameter.default)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        given = "" if parameter.default is parameter.empty else f" = {default}"
        texts.append(f"{stars}{parameter.name}: {parameter.annotation}{given}")
    ends = "" if inspect.isclass(function) else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(texts)}){ends}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){ends}"
    return f"```text\n{line}\n```"


def _doc(value: Any, short: bool = False) -> str:
    text = inspect.getdoc(value) or ""
    assert text, f"{value} has no docstring"
    return " ".join(text.split()).replace("|", "\\|") if short else text


def notebook() -> str:
    """Return the tutorial of docs/start.md as a notebook: texts, and commands that run in the repository."""
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n", "", text).replace("](img/", "](../docs/img/")
    text = re.sub(r"\]\((\w+\.md)", r"](../docs/\1", text)
    # Commands are those of a person at the root of the repository.
    cells = [_cell("code", 'import os\n\nos.chdir("..")')]
    for language, block, words in re.findall(r"```(\w+)\n(.*?)```\n|((?:(?!```).)+)", text, re.DOTALL):
        commands = [line for line in block.splitlines() if line.startswith(("zerodrift ", "$ zerodrift "))]
        if commands:
            cells.append(_cell("code", "\n".join("!" + line.removeprefix("$ ") for line in commands)))
        elif language == "bash":
            cells.append(_cell("code", "\n".join(f"# !{line}" for line in block.splitlines())))
        elif words.strip():
            cells.append(_cell("markdown", words.strip()))
    for number, cell in enumerate(cells):
        cell["id"] = f"start-{number}"
    # The second look at one command shows another part of its output.
    cells = [
        cell
        for number, cell in enumerate(cells)
        if cell["source"] not in [c["source"] for c in cells[:number]]
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    page = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _cell(kind: str, text: str) -> dict[str, Any]:
    lines = text.splitlines(keepends=True)
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": lines}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


def main() -> None:
    for name, text in generated().items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
    for name, text in pictures().items():
        (ROOT / "docs" / "img" / name).write_text(text, encoding="utf-8")
    for page in pages():
        page.write_text(fresh(page.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "examples" / "start.ipynb").write_text(notebook(), encoding="utf-8")


if __name__ == "__main__":
    main()
