"""The package as a whole: rooms import only rooms above them, by their faces; there is no circle of files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import yaml

import zerodrift
from tests.unit.sources import PACKAGE, PATHS, module_of, name_of, nodes, tree
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
    plan policy report model dtypes errors files legible mesh record versions
lightning: api checkpoint config engine errors
verl: api checkpoint comm config engine model weights errors
deepspeed: api checkpoint config engine comm inspect.trace inspect.check optim plan policy weights dtypes
    errors optimizers alias versions
cli: alias startup inspect.trace inspect.check inspect.audit inspect.drift inspect.simulate train api
    pipeline checkpoint weights config model plan policy report errors mesh legible files versions
"""

ROOMS = {room: {*(above or "").split()} for room, above in yaml.safe_load(_ROOMS).items()}
"""Room -> the rooms it may import. `__init__` and `__main__` of the package may import everything."""


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


def is_attribute_of(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def test_other_rooms_names_come_from_their_faces() -> None:
    inits = (PACKAGE / room.replace(".", "/") / "__init__.py" for room in ROOMS)
    faces = {room_of(init.parent): homes_of(init.read_bytes()) for init in inits if init.exists()}
    wrong = []
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.ImportFrom) or not f"{node.module}.".startswith("zerodrift."):
                continue
            _, _, module = str(node.module).partition(".")
            for alias in node.names:  # a room itself: what is taken of it are attributes
                target = f"{module}.{alias.name}".strip(".")
                if faces.get(target) and target != room_of(path):
                    names = {each.attr for each in nodes(path) if is_attribute_of(alias.name, each)}
                    wrong += [f"{name_of(path)}: {name}" for name in names - faces[target].keys()]
            target, names = room(module), {alias.name for alias in node.names}
            of_another = faces.get(target) and target != room_of(path) and path.stem[:2] != "__"
            if of_another and not (module == target and names <= faces[target].keys()):
                wrong.append(f"{name_of(path)}:{node.lineno}: {sorted(names)} of {module}")
    assert wrong == []


def test_importing_and_planning_need_no_torch() -> None:
    code = (
        "import sys, zerodrift, zerodrift.model.sources\n"
        "assert not {'torch', 'transformers', 'safetensors', 'pydantic'} & set(sys.modules)\n"
        "zerodrift.resolve(zerodrift.load({}), zerodrift.MeshShape())\n"
        "import zerodrift.cli, zerodrift.cli.plan, zerodrift.report.terminal\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_real_and_exported_for_strict_type_checkers() -> None:
    assert all(getattr(zerodrift, name) is not None for name in zerodrift.__all__)
    assert set(zerodrift.__all__) <= set(dir(zerodrift)) and not hasattr(zerodrift, "nothing_like_it")
    (block,) = (node for node in tree(PACKAGE / "__init__.py").body if isinstance(node, ast.If))
    aliases = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases), "`import X as X` is what makes X public"


def test_the_table_is_in_order() -> None:
    above: set[str] = set()
    for name, imported in ROOMS.items():
        assert imported <= above, f"{name} imports {sorted(imported - above)}, which stand below it"
        above.add(name)


def test_no_circle_of_files_and_no_class_name_twice() -> None:
    """Imports in functions and under TYPE_CHECKING count too. A package counts only for a name of its own."""
    modules = {module_of(path): nodes(path) for path in FILES}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, own in modules.items():
        for name, _ in imports(own):
            package, _, target = name.partition(".")
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if package == "zerodrift" and target != module:
                assert target, f"{module} imports the root"
                graph[module].add(target)
    TopologicalSorter(graph).prepare()  # raises for a circle, and names it
    classes = Counter(node.name for own in modules.values() for node in own if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []


def test_only_comm_calls_collectives() -> None:
    calls = {"all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"}
    calls |= {"all_reduce", "all_to_all_single", "broadcast", "isend", "irecv"}
    places = {
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in calls
        if isinstance(node.value, ast.Name) and node.value.id in ("dist", "distributed")
    }
    # `deepspeed.comm` is torch.distributed for a script's own collectives, not for the engine's.
    assert {name for name in places if not name.startswith("comm/")} == {"deepspeed/tools/collectives.py"}
