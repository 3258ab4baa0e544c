"""Compile the Triton programs for a GPU that need not be there, and print the instructions.

`test_triton.py` runs this in a process of its own: Triton decides on its import whether it compiles.

    python -m tests.numerics.compile_programs 90 1    # every program; 5: every fifth
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zerodrift.dtypes import NARROW, DType
from zerodrift.kernels import device, narrow, narrow_programs, programs

MOMENTS = ("*fp32", "*i16", "*i16", "*u8")
MASTERS = ("*fp32", "*i16", None)


def compiled(
    target: GPUTarget, program: Any, types: dict[str, str], fixed: dict[str, Any], **shape: int
) -> Counter[str]:
    """Count the instructions of a program with arguments of these types, and with constants."""
    names = program.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    # What a launch finds out by itself: addresses and a count that are multiples of 16.
    aligned = [name for name in types if types[name][0] == "*" or name == "numel"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(program, signature, fixed, attributes)
    made = triton.compile(source, target=target, options=device.strict_options(target) | shape)
    return Counter(re.findall(r"^\s+(?:@%p\d+ )?([a-z][\w.:]*)", made.asm["ptx"], re.MULTILINE))


def update(target: GPUTarget, algorithm: int, master: int, state: int) -> Counter[str]:
    """Compile one pass over memory, with bf16 storage and fp32 gradients."""
    two, coded = algorithm == 0, state == 3
    types = {
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
    shape = device.shape_of_update(coded, is_nvidia=True)
    fixed = {"master_kind": master, "state": state, "algorithm": algorithm, "tile": shape.pop("tile")}
    fixed |= {"fma_add": True, "fma_addcmul": True, "fma_lerp": True}
    fixed |= {name: None for name, kind in types.items() if kind is None}
    given = {name: kind for name, kind in types.items() if kind is not None}
    return compiled(target, programs.update, {**given, "numel": "i64", "stochastic": "i64"}, fixed, **shape)


def encode_or_decode(target: GPUTarget, dtype: DType, way: int) -> Counter[str]:
    """Compile encoding or decoding bf16 in a narrow format."""
    fixed = narrow.choices(NARROW[dtype]) | {"way": way, "keys": None}
    fixed["tile"] = device.NARROW_SPAN // fixed["block"]
    scale = ("*fp32", "*i16", "*u8")[fixed["scale"]]
    types = {"codes": "*u8", "scales": scale, "values": "*i16", "numbers": "*fp32", "numel": "i64"}
    types = {name: kind for name, kind in types.items() if name not in fixed}
    return compiled(target, narrow_programs.narrow, {**types, "number": "i64"}, fixed)


def main() -> None:
    target, every = GPUTarget("cuda", int(sys.argv[1]), 32), int(sys.argv[2])
    cases = [*itertools.product(range(3), range(3), range(4))][::every]
    flat = [dtype for dtype, form in NARROW.items() if form.is_flat]
    runs = [*itertools.product(flat[::every], range(3))]
    found = {
        "options": device.strict_options(target),
        "passes": {" ".join(map(str, case)): update(target, *case) for case in cases},
        "runs": {" ".join(map(str, run)): encode_or_decode(target, *run) for run in runs},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
