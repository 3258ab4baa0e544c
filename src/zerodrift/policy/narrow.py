"""Narrow formats on the wire and in products: the parameters that may have them, and the refusals.

`columns.py` and `resolver.py` refuse with the records of this file, and the support table lists them.

`compute: fp8`: a linear layer has three products, its output (`forward`), the gradient of its input
(`grad_input`) and that of its weight (`grad_weight`). The key in `precision` is for hidden linear layers.
Embeddings, heads, routers, norms, convolutions and adapters keep their products, with a reason. Any other
matrix is refused by name. A rule is for every linear layer that it matches.

Invariant: a combination is refused here by name, or runs as the plan says. A product that keeps the compute
dtype has a reason in the plan, or is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from zerodrift.dtypes import DType
from zerodrift.errors import Problems
from zerodrift.model import ParameterSpec
from zerodrift.policy.decisions import Columns, Decision, Exclusion

FROZEN = Exclusion(
    "a frozen parameter",
    "it never changes, and would be rounded at each gather",
    "Use `storage` for it.",
    "gather",
    "not be narrow for a frozen parameter",
)
STORAGE = Exclusion(
    "sharded storage in another dtype than fp32 under a narrow gather",
    "storage is encoded for each gather, and is its own master",
    "Leave `storage` out.",
    "storage",
    "be fp32 where `gather` is narrow and storage is sharded",
)
MASTER = Exclusion(
    "another master than fp32 under a narrow gather of whole storage",
    "storage then has the rounded values",
    "Leave `master` out, or use stage 3.",
    "master",
    "be fp32 where `gather` is narrow and storage is whole",
)
SUM = Exclusion(
    "a sum in another dtype than fp32 under a narrow wire",
    "every part is decoded to fp32",
    "Leave `reduce.sum` out.",
    "reduce.sum",
    "be fp32 where the wire is narrow",
)
NO_WIRE = Exclusion(
    "feedback on a plain wire",
    "there is little to give back",
    "Set `reduce.wire` to a narrow format, such as int4.",
    "reduce.feedback",
    "have a narrow wire",
)
NEAREST = Exclusion(
    "stochastic rounding on a plain wire",
    "a cast to a plain dtype rounds to the nearest value",
    "Set `reduce.wire` to a narrow format, such as int4.",
    "reduce.rounding",
    "have a narrow wire",
)
SCALED = Exclusion(
    "feedback with a loss scale",
    "a scale that changes from step to step would change the rounding error",
    "Use mode bf16.",
    "reduce.feedback",
    "be in a mode without a loss scale",
)
ACCUMULATE = Exclusion(
    "feedback without an fp32 accumulator",
    "the rounding error is added to it",
    "Leave `accumulate` out.",
    "reduce.feedback",
    "have an fp32 `accumulate`",
)
TWICE = Exclusion(
    "feedback with replicas or expert parallelism",
    "their sums are rounded once more, by ranks that do not keep it",
    "Leave `sharding.replicate` and `experts` out, or the feedback.",
    "reduce.feedback",
    "be left out with replicas or expert parallelism",
)
WIRE_BACKEND = Exclusion(
    "a narrow wire on backend fsdp2",
    "`fully_shard` cuts gradients where blocks do not end",
    "Use the native backend.",
    "reduce.wire",
    "not be narrow on backend fsdp2",
)
GATHER_BACKEND = Exclusion(
    "a narrow gather on backend fsdp2",
    "`fully_shard` casts before it gathers, and cuts weights where blocks do not end",
    "Use the native backend.",
    "gather",
    "not be narrow on backend fsdp2",
)

TRAVEL = (
    *(FROZEN, STORAGE, MASTER, GATHER_BACKEND, SUM, NO_WIRE, NEAREST, SCALED, ACCUMULATE, TWICE),
    WIRE_BACKEND,
)
"""All that narrow gathers and wires are refused with, beside `order: tree` and `order: native`."""

SLICED = "formats with a scale per row or tile do not travel: a slice would cut their blocks"


# --- products --------------------------------------------------------------------------------------------


LINEARS = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")
"""Classes of linear layers, whose forward is one product with `weight`."""

MULTIPLE = 16
"""Sizes of a weight are multiples of this: GPUs have no other products of fp8 operands."""

ADAPTER = re.compile(r".*\.lora_(A|B|embedding_A|embedding_B)\..*")
"""Names of adapters, which are narrow on one side."""


BACKEND = Exclusion(
    "backend fsdp2",
    "`fully_shard` swaps the parameters by which products are recognised",
    "Use backend native",
)
PIN = Exclusion(
    "a pinned parameter", "a pin rounds nowhere, and fp8 operands are rounded", "Leave one of the two out"
)
MATRIX = Exclusion(
    "a matrix of a module that is neither a linear layer nor a stack of experts",
    f"its products are known for {' and '.join(name.rpartition('.')[2] for name in LINEARS)} only",
    "Leave it in the compute dtype by a rule",
)
SIZE = Exclusion(
    f"a weight whose sizes are no multiples of {MULTIPLE}",
    "GPUs have no such product",
    "Write `compute: {pad: true}` in a rule to fill it up with zeros, or leave it in the compute dtype",
)

DEVICE = Exclusion(
    "a device without such products",
    "CPUs compute the definition, NVIDIA GPUs have products in e4m3 from compute capability 8.9 on",
    "Train on one of these",
)

UNFIT = (BACKEND, PIN, MATRIX, SIZE, DEVICE)
"""All that `compute: fp8` is refused with."""


def why_without(parameter: ParameterSpec, role: str) -> tuple[str, str]:
    """Return why a parameter has no product of its own, and why its product is left alone by default.

    `role` is what the parameter is by its names, or `""` for a hidden matrix.
    """
    if len(parameter.shape) < 2:
        return "a bias, added to a product" if parameter.name.endswith("bias") else "no matrix", ""
    if role == "a bias":
        return role, ""
    if ADAPTER.fullmatch(parameter.name):
        return "", "an adapter: its products are small"
    return "", role


def is_linear(parameter: ParameterSpec) -> bool:
    """Return True for weights of linear layers only, and for experts in a stack `[experts, ., .]`.

    A class that is not known counts as a linear layer.
    """
    if len(parameter.shape) == 3:
        return all("experts" in name.split(".") for name in parameter.names)
    return len(parameter.shape) == 2 and all(
        not owner.klass or (owner.klass in LINEARS and name.endswith("weight"))
        for name, owner in zip(parameter.names, parameter.owners, strict=True)
    )


def require_fit(parameter: ParameterSpec, columns: Columns, problems: Problems) -> bool:
    """Return True if the products of a parameter have a definition and a device. Refuse others by name."""
    products = columns.products
    if products is None:
        return True
    got: object = f"shape {list(parameter.shape)}"
    refusal: Exclusion | None = None
    if columns.pinned:
        refusal, got = PIN, "pinned"
    elif not is_linear(parameter):
        refusal = MATRIX
        classes = dict.fromkeys(owner.klass.rpartition(".")[2] for owner in parameter.owners if owner.klass)
        got = f"{got} of {' and '.join(classes) or 'a class that is not known'}"
    elif not products.pad and any(size % MULTIPLE for size in parameter.shape[-2:]):
        refusal = SIZE
    if refusal is None:
        return True
    do = refusal.do
    if refusal is MATRIX:
        do = f'{do}: `{{match: "{template(parameter.name)}", compute: {columns.compute}}}`'
    where = columns.reasons()["products"]
    must = f"must not be multiplied in fp8 (`{where}`), as {refusal.what}: {refusal.reason}"
    problems.add(parameter.name, must, got=got, do=f"{do}.")
    return False


def template(name: str) -> str:
    """Return a glob for the same parameter of every block."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def decide_products(
    backend: str, asked: Iterable[tuple[str, str, str]], problems: Problems
) -> tuple[Decision, ...]:
    """Return the decision on products, and refuse what excludes all of them.

    `asked` are the columns of the config and of its rules, as (column, value, key).
    """
    fp8 = str(DType.FP8_ROW)
    where = next((why for name, value, why in asked if name.startswith("compute.") and value == fp8), "")
    if not where:
        return ()
    if backend != "native":
        must = f"must be left out with {BACKEND.what}: {BACKEND.reason}"
        problems.add(where, must, got="fp8", do=f"{BACKEND.do}; or leave fp8 out.")
    rowwise = "linear layers: e4m3, an fp32 scale per row of what is summed, exact sums, rounded once"
    others = "attention scores and other products of two activations are not changed"
    return (Decision("fp8 products", rowwise, f"`{where}`; {others}"),)
