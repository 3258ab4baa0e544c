"""The package as a whole: a room imports only the rooms above it, no circle of files, unique class names.

`test_words.py` checks the notes and verbs that texts cite.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import symtable
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

import zerodrift
from tests.unit.sources import PACKAGE, PATHS, module_of, name_of, nodes, source, tree
from zerodrift.faces import homes_of

_ROOMS = """
faces:
legible:
files:
errors: legible
record:
dtypes: errors
mesh: errors
versions:
startup: errors
alias: errors versions
optimizers:
config: dtypes errors files mesh optimizers
model: dtypes errors files record
policy: config dtypes errors mesh model optimizers record
plan: policy dtypes errors mesh model optimizers record
report: plan policy dtypes errors mesh model record config legible
kernels: dtypes errors files
comm: kernels dtypes errors mesh
optim: kernels plan policy dtypes errors mesh optimizers
experts: comm plan errors
engine: experts optim kernels comm plan policy report model dtypes errors mesh
pipeline: engine experts comm kernels plan policy report errors versions
backends: engine model optim comm plan policy report errors optimizers
checkpoint: engine optim comm kernels plan policy report model dtypes errors files mesh record versions
weights: checkpoint engine comm kernels plan policy model dtypes errors mesh optimizers versions
inspect:
inspect.trace: backends engine comm model plan policy dtypes errors startup
inspect.check: inspect.trace config model plan policy report dtypes errors files startup
inspect.audit: inspect.trace inspect.check engine comm kernels weights checkpoint config model plan policy
    report dtypes errors files mesh optimizers
inspect.drift: inspect.audit inspect.trace inspect.check weights checkpoint config model plan policy report
    dtypes errors files mesh
inspect.simulate: inspect.trace engine comm config model plan policy report dtypes errors mesh record
api: backends weights config model plan policy mesh engine comm report optim pipeline dtypes errors versions
train: api inspect.trace inspect.check inspect.audit pipeline config engine checkpoint weights comm kernels
    plan policy report model dtypes errors files legible mesh versions
lightning: api checkpoint config engine errors
verl: api checkpoint comm config engine model weights errors
deepspeed: api checkpoint config engine comm inspect.trace inspect.check optim plan policy weights dtypes
    errors optimizers alias versions
cli: alias startup inspect.trace inspect.check inspect.audit inspect.drift inspect.simulate train api
    pipeline checkpoint weights config model plan policy report errors mesh legible files versions
"""

ROOMS = {room: {*(above or "").split()} for room, above in yaml.safe_load(_ROOMS).items()}
"""Room -> the rooms it may import. `__init__` and `__main__` of the package may import everything."""

TORCH_FREE = {
    *{"errors", "record", "dtypes", "mesh", "versions", "optimizers"},
    *{"config", "policy", "plan", "report", "cli"},
}
"""Rooms that must be importable without torch."""


def room(module: str) -> str:
    """Return the room of a module, named without the package."""
    first, _, rest = module.partition(".")
    inner = f"{first}.{rest.split('.')[0]}"
    return inner if inner in ROOMS else first


def room_of(path: Path) -> str:
    return room(module_of(path))


def imports(among: Iterable[ast.AST]) -> list[tuple[str, int]]:
    """Return every absolute import among nodes, with its line."""
    found = []
    for node in among:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name, node.lineno) for name in names]
    return found


FILES = [path for path in PATHS if path.parent != PACKAGE or path.stem[:2] != "__"]


def test_a_room_imports_only_rooms_above_it() -> None:
    assert {room_of(path) for path in FILES} <= ROOMS.keys()
    wrong = []
    for path in FILES:
        own = room_of(path)
        for name, line in imports(nodes(path)):
            package, _, rest = name.partition(".")
            target = room(rest)
            if package == "zerodrift" and target in ROOMS and target not in {own, "faces", *ROOMS[own]}:
                wrong.append(f"{name_of(path)}:{line}: {own} must not import {target}")
    assert wrong == []


def test_a_face_offers_a_file_of_a_folder_that_nothing_has_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house" / "step").mkdir(parents=True)
    (tmp_path / "house" / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nfrom zerodrift.faces import face\nif TYPE_CHECKING:\n"
        "    from house.step import compute\n    from house.step.compute import WIDTH\n"
        "__getattr__, __dir__, __all__ = face(__name__)\n"
    )
    (tmp_path / "house" / "step" / "__init__.py").write_text("")
    (tmp_path / "house" / "step" / "compute.py").write_text("WIDTH = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    house = importlib.import_module("house")
    assert house.compute.WIDTH == house.WIDTH == 3
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = house.missing


def is_attribute_of(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def test_other_rooms_names_come_from_their_faces() -> None:
    inits = (PACKAGE / room.replace(".", "/") / "__init__.py" for room in ROOMS)
    faces = {room_of(init.parent): homes_of(init.read_bytes()) for init in inits if init.exists()}
    used, wrong = defaultdict(set), []
    for path in [*FILES, PACKAGE / "__init__.py", PACKAGE / "__main__.py"]:
        for node in nodes(path):
            if not isinstance(node, ast.ImportFrom) or not f"{node.module}.".startswith("zerodrift."):
                continue
            _, _, module = str(node.module).partition(".")
            for alias in node.names:  # a room itself: what is taken of it are attributes
                target = f"{module}.{alias.name}".strip(".")
                if faces.get(target) and target != room_of(path):
                    names = {each.attr for each in nodes(path) if is_attribute_of(alias.name, each)}
                    used[target] |= names
                    wrong += [f"{name_of(path)}: {name}" for name in names - faces[target].keys()]
            target, names = room(module), {alias.name for alias in node.names}
            if not faces.get(target) or target == room_of(path):
                continue
            used[target] |= names
            if path.stem[:2] != "__" and (module != target or not names <= faces[target].keys()):
                wrong.append(f"{name_of(path)}:{node.lineno}: {sorted(names)} of {module}")
    assert wrong == []
    # for scripts: docs/pipelines.md
    used["pipeline"] |= {"BatchResult", "Parts", "WeightQueue", "defer_weight_grads"}
    unused = {name: sorted(face.keys() - used[name]) for name, face in faces.items()}
    assert {name: names for name, names in unused.items() if names} == {}


def test_importing_and_planning_need_no_torch() -> None:
    code = (
        "import sys, zerodrift, zerodrift.model.sources\n"
        "assert not {'torch', 'transformers', 'safetensors', 'pydantic'} & set(sys.modules)\n"
        "zerodrift.resolve(zerodrift.load({}), zerodrift.MeshShape())\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_real_and_exported_for_strict_type_checkers() -> None:
    assert all(getattr(zerodrift, name) is not None for name in zerodrift.__all__)
    assert set(zerodrift.__all__) <= set(dir(zerodrift)) and not hasattr(zerodrift, "nothing_like_it")
    (block,) = (node for node in tree(PACKAGE / "__init__.py").body if isinstance(node, ast.If))
    aliases = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases), "`import X as X` is what makes X public"


def test_pure_rooms_do_not_import_torch_at_the_top() -> None:
    wrong = []
    for path in FILES:
        top = tree(path).body if room_of(path) in TORCH_FREE else []
        heavy = [name for name, _ in imports(top) if name.split(".")[0] in ("torch", "transformers")]
        wrong += [f"{name_of(path)}: {name}" for name in heavy]
    assert wrong == []


def test_the_table_is_in_order() -> None:
    above: set[str] = set()
    for name, imported in ROOMS.items():
        assert imported <= above, f"{name} imports {sorted(imported - above)}, which stand below it"
        above.add(name)


def test_only_comm_calls_collectives() -> None:
    calls = {
        *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
        *("all_reduce", "all_to_all_single", "broadcast", "isend", "irecv"),
    }
    # `deepspeed.comm` is torch.distributed for a script's own collectives, not for the engine's.
    allowed = {f"comm/{name}.py" for name in ("collectives", "native", "pairs", "shared", "watch")}
    allowed.add("deepspeed/tools/collectives.py")
    places = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        if name_of(path) not in allowed
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in calls
        if isinstance(node.value, ast.Name) and node.value.id in ("dist", "distributed")
    ]
    assert places == []


def test_no_room_reads_the_environment_but_those_that_may() -> None:
    allowed = {
        *("comm/mesh.py", "comm/rendezvous.py", "cli/streams.py"),
        *("startup.py", "train/loop/launcher.py", "deepspeed/tools/collectives.py", "deepspeed/runner.py"),
        "engine/habits/determinism.py",  # sets what cuBLAS and flash-attention read
        "versions.py",  # the first rank speaks for all
        "files.py",  # the user's cache folder
        "train/data/files.py",  # looks where huggingface_hub does
    }
    reading = {
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert {name for name in reading if not name.startswith("kernels/")} <= allowed


# --- files ------------------------------------------------------------------------------------------------


Sources = Mapping[str, Sequence[ast.AST]]
"""Module without the package's name -> the nodes of its source; the root is `""`."""


def sources() -> Sources:
    return {module_of(path): nodes(path) for path in PATHS}


def edges(sources: Sources) -> dict[str, set[str]]:
    """Return the imports of each module; a package counts only for a name of its own."""
    found: dict[str, set[str]] = {module: set() for module in sources}
    for module, own in sources.items():
        for name, _ in imports(own):
            first, _, rest = name.partition(".")
            while first == "zerodrift" and rest not in sources:
                rest = rest.rpartition(".")[0]
            if first == "zerodrift" and rest != module:
                found[module].add(rest)
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """Return sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = set(graph[ahead.pop()]) - seen
            seen |= new
            ahead += new
        return seen

    reach = {module: reached(module) for module in graph}
    inside = [module for module in graph if module in reach[module]]
    return {frozenset(other for other in reach[module] if module in reach[other]) for module in inside}


def twice(sources: Sources) -> dict[str, list[str]]:
    """Return the modules that define a class of the same name, for each such name."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, own in sources.items():
        for node in own:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_circle_of_files() -> None:
    """Imports in functions and under TYPE_CHECKING count too. The root imports nearly everything, and
    nothing imports it; `__main__` is run, not imported."""
    graph = edges(sources())
    assert not [module for module, targets in graph.items() if "" in targets and module != "__main__"]
    inside = {module: targets - {""} for module, targets in graph.items() if module}
    assert not [sorted(circle) for circle in circles(inside)]


def test_no_class_has_anothers_name() -> None:
    assert not twice(sources())


def reused(table: symtable.SymbolTable) -> list[str]:
    """Return loop variables of comprehensions that shadow a free variable of their function: Python 3.12
    and 3.13 then take the variable from a `lambda` beside them."""
    found = []
    for inner in table.get_children():
        if table.get_type() == "function" and inner.get_name() in ("listcomp", "setcomp", "dictcomp"):
            outer = set(table.get_frees()) if isinstance(table, symtable.Function) else set()
            names = {symbol.get_name() for symbol in inner.get_symbols() if symbol.is_local()}
            found += [f"{name} in line {inner.get_lineno()}" for name in sorted(names & outer)]
        found += reused(inner)
    return found


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="symtable knows no scope of comprehensions any more")
def test_no_comprehension_takes_the_name_of_what_its_function_closes_over() -> None:
    tables = {path: symtable.symtable(source(path), str(path), "exec") for path in PATHS}
    assert {str(path): names for path, table in tables.items() if (names := reused(table))} == {}
    inner = "        show = lambda: own\n        return show(), [{name} for {name} in pairs]\n"
    text = "def outer(own):\n    def before(pairs):\n" + inner + "    return before\n"
    assert reused(symtable.symtable(text.format(name="own"), "planted", "exec")) == ["own in line 4"]
    assert reused(symtable.symtable(text.format(name="each"), "planted", "exec")) == []


def planted(**texts: str) -> Sources:
    return {"": (), **{name: tuple(ast.walk(ast.parse(text))) for name, text in texts.items()}}


def test_a_planted_circle_root_or_name_is_seen() -> None:
    lazy = "def f():\n    from zerodrift.b import g"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zerodrift.a import f"
    both = planted(a=lazy, b=typed, c="import zerodrift.a")
    assert circles(edges(both)) == {frozenset({"a", "b"})}
    assert circles(edges(planted(a=lazy, b=""))) == set()
    texts = {"from zerodrift import resolve": "", "import zerodrift": "", "from zerodrift import b": "b"}
    assert {text: edges(planted(a=text, b=""))["a"] for text in texts} == {t: {to} for t, to in texts.items()}
    both = planted(a="class One: ...\nclass Two: ...", b="def f():\n    class Two: ...")
    assert twice(both) == {"Two": ["a", "b"]}
