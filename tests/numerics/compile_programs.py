"""Compile the Triton programs for a GPU that need not be there, and print the instructions.

`test_triton.py` runs this in a process of its own: Triton decides on its import whether it compiles.

    python -m tests.numerics.compile_programs 90 1    # every program; 5: every fifth
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zerodrift.dtypes import NARROW, DType, Element
from zerodrift.kernels import device, narrow, narrow_programs, programs

MOMENTS = ("*fp32", "*i16", "*i16", "*u8")
MASTERS = ("*fp32", "*i16", None)
CASES = [(algorithm, master, state) for algorithm in range(3) for master in range(3) for state in range(4)]


def types_of(algorithm: int, master: int, state: int) -> dict[str, str | None]:
    """Return the types of the tensors in `kernels/device.py`, with bf16 storage and fp32 gradients."""
    two, coded = algorithm == 0, state == 3
    return {
        "grad": "*fp32",
        "storage": "*i16",
        "master": MASTERS[master],
        "moment1": MOMENTS[state],
        "moment2": MOMENTS[state] if two else None,
        "scale1": "*fp32" if coded else None,
        "scale2": "*fp32" if coded and two else None,
        "codes": "*fp32" if coded else None,
        "groups": "*i32",
        "keys": "*i64" if state > 1 else None,
        "table": "*fp32",
        "wanted": None,
    }


def compiled(target: GPUTarget, algorithm: int, master: int, state: int) -> str:
    """Return the assembly of one pass."""
    types = types_of(algorithm, master, state)
    numbers = {"numel": "i64", "stochastic": "i64"}
    shape = device.shape_of_update(state == 3, is_nvidia=True)
    fixed = {"master_kind": master, "state": state, "algorithm": algorithm, "tile": shape.pop("tile")}
    fixed |= {"fma_add": True, "fma_addcmul": True, "fma_lerp": True}
    fixed |= {name: None for name, kind in types.items() if kind is None}
    names = programs.update.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name) or numbers[name] for name in names}
    # What a launch finds out by itself: addresses and a count that are multiples of 16.
    aligned = [name for name in names if signature[name][0] == "*" or name == "numel"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(programs.update, signature, fixed, attributes)
    options = device.strict_options(target) | shape
    return triton.compile(source, target=target, options=options).asm["ptx"]


def compiled_narrow(target: GPUTarget, dtype: DType, way: int, drawn: bool = False) -> str:
    """Return the assembly of encoding or decoding bf16 in a narrow format."""
    fixed = narrow.choices(NARROW[dtype]) | {"way": way} | ({} if drawn else {"keys": None})
    fixed["tile"] = device.NARROW_SPAN // fixed["block"]
    scale = ("*fp32", "*i16", "*u8")[fixed["scale"]]
    types = {"codes": "*u8", "scales": scale, "values": "*i16", "numbers": "*fp32", "numel": "i64"}
    types |= {"keys": "*i64", "number": "i64"}
    names = narrow_programs.narrow.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in types if name not in (*fixed, "number")
    }
    source = ASTSource(narrow_programs.narrow, signature, fixed, attributes)
    return triton.compile(source, target=target, options=device.strict_options(target)).asm["ptx"]


def compiled_tree(target: GPUTarget, parts: str, out: str, count: int) -> str:
    """Return the assembly of a sum by the tree over so many parts."""
    fixed = {"count": count, "height": (count - 1).bit_length(), "tile": device._SPAN}
    fixed["narrow"] = 1 if out == "*i16" else 0
    types = {"parts": parts, "out": out, "numel": "i32"}
    names = programs.tree_sums.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    source = ASTSource(programs.tree_sums, signature, fixed)
    return triton.compile(source, target=target, options=device.strict_options(target)).asm["ptx"]


def words_of(assembly: str) -> Counter[str]:
    return Counter(re.findall(r"^\s+(?:@%p\d+ )?([a-z][\w.:]*)", assembly, re.MULTILINE))


def main() -> None:
    target, every = GPUTarget("cuda", int(sys.argv[1]), 32), int(sys.argv[2])
    passes = {" ".join(map(str, case)): words_of(compiled(target, *case)) for case in CASES[::every]}
    flat = [dtype for dtype, form in NARROW.items() if form.is_flat][::every]
    runs = {
        f"{dtype} {way}": words_of(compiled_narrow(target, dtype, way)) for dtype in flat for way in range(3)
    }
    drawn = [dtype for dtype in flat if NARROW[dtype].element is not Element.NF4]
    runs |= {f"{dtype} drawn": words_of(compiled_narrow(target, dtype, 0, drawn=True)) for dtype in drawn}
    kinds = [(*types, count) for types in (("*fp32", "*fp32"), ("*i16", "*i16")) for count in (3, 8, 24)]
    trees = {" ".join(map(str, kind)): words_of(compiled_tree(target, *kind)) for kind in kinds}
    options = device.strict_options(target)
    print(json.dumps({"options": options, "passes": passes, "runs": runs, "trees": trees}))


if __name__ == "__main__":
    main()
