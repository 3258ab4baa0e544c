"""`compute: fp8`: the parameters whose matrix products have fp8 operands, and what it is refused with.

A linear layer has three products: its output (`forward`), the gradient of its input (`grad_input`) and that
of its weight (`grad_weight`). The key in `precision` is for hidden linear layers. Embeddings, heads, routers,
norms, convolutions and adapters keep their products, with a reason. Any other matrix is refused by name. A
rule is for every linear layer that it matches.

Invariant: no product is left as it is without a reason in the plan or an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from zerodrift.errors import Problems
from zerodrift.model import ParameterSpec
from zerodrift.policy.backends import Backend
from zerodrift.policy.decisions import Columns, Decision, Exclusion

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


def decide_products(backend: Backend, asked: Iterable[str], problems: Problems) -> tuple[Decision, ...]:
    """Return the decision on products, and refuse what excludes all of them. `asked` are keys that ask."""
    where = next(iter(asked), "")
    if not where:
        return ()
    if backend.name != "native":
        must = f"must be left out with {BACKEND.what}: {BACKEND.reason}"
        problems.add(where, must, got="fp8", do=f"{BACKEND.do}; or leave fp8 out.")
    rowwise = "linear layers: e4m3, an fp32 scale per row of what is summed, exact sums, rounded once"
    others = "attention's scores and other products of two activations stay as they are"
    return (Decision("fp8 products", rowwise, f"`{where}`; {others}"),)
