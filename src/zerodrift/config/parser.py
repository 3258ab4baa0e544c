"""Parse a config file into plain values: JSON, Hjson by its package, YAML by its 1.2 core schema.

PyYAML follows YAML 1.1, where `1e-5` is a string, `on` is true, `010` is 8 and `1:30` is 90. Only PyYAML's
parser is used, and scalars get the types of the YAML 1.2 core schema, as users expect.

Invariant: every failure is a ConfigError, with file, line and column if known. The values are dicts, lists,
strings, numbers, booleans and None, and a dict remembers its repeated keys.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import yaml

from zerodrift.errors import ConfigError, nearest_path
from zerodrift.files import opened

MAX_BYTES = 1_000_000
"""Largest file: hundreds of times the longest known config."""

MAX_DIGITS = 400
"""Digits of a whole number that are converted. A number with more digits is refused in any case."""

MAX_NODES = 20_000
"""Most YAML nodes in a file: as many values as a config may hold, each with a key."""


class SourceBlock(dict[Any, Any]):
    """A dict that remembers how its source spelled it."""

    repeated: tuple[Any, ...] = ()
    kind: type | None = None
    """Class of a typed block; None for a dict or a file."""


def read(path: str | os.PathLike[str]) -> Any:
    """Read a file: `.json`, `.hjson`, `.yaml` and `.yml` by its ending, any other by its first character."""
    name, text = _text(path)
    suffix = os.path.splitext(name)[1].lower()
    if not text.strip():
        _refuse(name, "must hold a config", "an empty file")
    if suffix in (".json", ".hjson") or (suffix not in (".yaml", ".yml") and text.lstrip().startswith("{")):
        return parse_json(text, name)
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> Any:
    """Parse a YAML text; messages call the text `name`."""
    loader = None
    try:
        loader = _CoreLoader(text, name)
        return loader.get_single_data()
    except yaml.constructor.ConstructorError as error:
        got = f"an alias of the block or list around it{_position(error.problem_mark)}"
        _refuse(name, "must not contain itself", got)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        line = "" if mark is None else "".join(text.splitlines()[mark.line : mark.line + 1])
        do = "Indent with spaces." if re.match(r" *\t", line) else ""
        _refuse(name, "must be valid YAML", what + _position(mark), do)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        row, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        _refuse(name, "must be valid YAML", f"a character that YAML forbids at line {row}, column {column}")
    except RecursionError:
        _refuse(name, "must not be nested so deeply", "hundreds of levels")
    except (ValueError, OverflowError) as error:
        # PyYAML's scanner raises these for escapes beyond Unicode.
        _refuse(name, "must be valid YAML", str(error))
    finally:
        if loader is not None:
            loader.dispose()


def _refuse(where: str, must: str, got: str = "", todo: str = "") -> NoReturn:
    raise ConfigError(where, must, got=got, do=todo) from None


def _text(path: str | os.PathLike[str]) -> tuple[str, str]:
    name = os.fsdecode(path)
    if name.lstrip().startswith("{"):
        _refuse("config", "must be a path or a dict", "a text that looks like JSON", "Parse it first.")
    try:
        with opened(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        looked = "" if os.path.isabs(os.path.expanduser(name)) else f" (looked for in {os.getcwd()})"
        _refuse(name, "must exist", f"no such file{looked}", nearest_path(name))
    except IsADirectoryError:
        _refuse(name, "must be a file", "a folder", "Name the file in it.")
    except OSError as error:
        _refuse(name, "must be readable", error.strerror or str(error))
    except ValueError as error:
        _refuse(ascii(name), "must be a path", str(error))
    if len(data) > MAX_BYTES:
        _refuse(name, f"must be a config of at most {MAX_BYTES:,} bytes", "more")
    try:
        return name, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        _refuse(name, "must be UTF-8 text", what, "Save it as UTF-8.")


def parse_json(text: str, name: str) -> Any:
    """Parse a JSON text, or else Hjson, as DeepSpeed does; messages call the text `name`."""
    try:
        return json.loads(text, object_pairs_hook=_block, parse_int=_short_integer)
    except json.JSONDecodeError as error:
        what = f"{error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
        do = _json_hint(text[: error.pos], text[error.pos :])
    except RecursionError:
        _refuse(name, "must not be nested so deeply", "hundreds of levels")
    try:
        if do != _AS_PYTHON:  # a word such as `True` is a string in Hjson
            hjson = importlib.import_module("hjson")
            return hjson.loads(text, object_pairs_hook=_block, parse_int=_short_integer)
    except ModuleNotFoundError:
        do = f"{do} Or run `pip install 'zerodrift[hjson]'`, if it is Hjson or JSON with comments.".strip()
    except (ValueError, IndexError, OverflowError, RecursionError):
        pass  # neither of the two: the message is that of JSON
    _refuse(name, "must be valid JSON", what, do)


def _block(pairs: list[tuple[str, Any]]) -> SourceBlock:
    made = SourceBlock(pairs)
    made.repeated = tuple(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return made


def _short_integer(digits: str) -> int:
    return int(digits[:MAX_DIGITS])


_AS_PYTHON = "JSON spells these true, false and null."


def _json_hint(before: str, rest: str) -> str:
    rest = rest.lstrip()
    if rest.startswith(("//", "/*", "#")):
        return "JSON has no comments: remove it, or write YAML, where # starts one."
    if rest.startswith((",}", ",]")) or (rest.startswith(("}", "]")) and before.rstrip().endswith(",")):
        return "JSON has no comma before a closing bracket: remove it."
    if rest.startswith("'"):
        return "JSON strings take double quotes."
    return _AS_PYTHON if re.match(r"(True|False|None)\b", rest) else ""


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the scalar types of the YAML 1.2 core schema.

    An alias yields the same object as its anchor.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    yaml_constructors: ClassVar[dict[str | None, Callable[[Any, Any], Any]]] = {}
    nodes = merged = 0

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.config_name = name

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(
                problem=f"more than {MAX_NODES:,} values", problem_mark=self.get_mark()
            )
        return super().compose_node(parent, index)

    def value(self, node: yaml.Node) -> Any:
        """Return the value of a node of any tag."""
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode) and kind in _SCALARS:
            try:
                return _SCALARS[kind](node.value)
            except (KeyError, ValueError):
                self._refuse(f"must hold a value of its tag {kind}", ascii(node.value)[:60], node)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.construct_object(item, deep=True) for item in node.value]
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._block(node)
        self._refuse("must be plain values, lists and blocks", f"the tag {node.tag!r}", node)

    def _block(self, node: yaml.MappingNode) -> SourceBlock:
        written: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        repeated = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse("must have strings as keys", "a list or a block as key", key_node)
            if key_node.value == "<<" and key_node.style is None:
                merged = self._merge(value_node) | merged
                continue
            key = self.construct_object(key_node)
            if key in written:
                repeated.append(key)
            written[key] = self.construct_object(value_node, deep=True)
        block = SourceBlock(merged | written)
        block.repeated = tuple(repeated)
        return block

    def _merge(self, node: yaml.Node) -> dict[Any, Any]:
        """Merge the blocks of `<<: *anchor` or of a list of anchors; the first block with a key wins."""
        sources = self.construct_object(node, deep=True)
        out: dict[Any, Any] = {}
        for source in sources if isinstance(sources, list) else [sources]:
            if not isinstance(source, dict):
                self._refuse("must merge blocks", "something else", node)
            self.merged += len(source)
            if self.merged > MAX_NODES:
                self._refuse(f"must merge at most {MAX_NODES:,} keys", "more", node)
            out = source | out
        return out

    def _refuse(self, must: str, got: str, node: yaml.Node) -> NoReturn:
        _refuse(self.config_name, must, got + _position(node.start_mark))


_TAG = "tag:yaml.org,2002:"

for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _CoreLoader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)
_CoreLoader.add_constructor(None, _CoreLoader.value)


def _integer(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2 : MAX_DIGITS + 2], base) if base != 10 else int(text[:MAX_DIGITS])


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _integer,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
}


def _position(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
