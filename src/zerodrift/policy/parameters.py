"""The columns of every parameter of a model under one policy.

Rules are matched by name. Columns are completed once per distinct input and equal results are one object, so
46,000 parameters cost a few dozen completions.

Muon updates hidden matrices by default, since it makes every direction of an update equally long: rows of an
embedding, a head or a router see few gradients. The rule is DeepSpeed's (two dimensions or more, and no name
with `embed` or `lm_head`) with a few more cases; every row of a plan says which case applied.

Invariant: the result depends on the policy, the parameter and its checkpoint dtype alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zerodrift import dtypes
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, Problems, listed
from zerodrift.model import ModelSpec, ParameterSpec
from zerodrift.policy import narrow, rules
from zerodrift.policy.columns import ParameterTraits, complete
from zerodrift.policy.decisions import Columns, Policy, uses_muon

MUON_RULE = (
    "hidden matrices, stacked ones one by one; not embeddings, heads, routers, norms, biases, convolutions"
)
"""The default rule of Muon in a clause, for reports."""

HEADS = ("lm_head", "head", "embed_out", "classifier", "score")
"""Last components of the module path of an output head."""

ROUTERS = ("router", "gate")
"""Name components of a router. `gate_proj` is not a router."""

_CONVOLUTION = re.compile(r"(Lazy)?Conv(Transpose)?[123]d")
"""Classes of torch's convolutions. `Conv1D`, which GPT-2 has, is a linear layer."""


_COMPUTED_WITH = re.compile(
    r"(?P<path>.*?)(\.parametrizations\.\w+\.\d+\._[uv]|\.running_(mean|var)|\.\w+_[uv])"
)
"""Names of buffers that torch computes with parameters: running statistics and vectors of spectral norms."""


def decide_columns(policy: Policy, model: ModelSpec) -> list[Columns]:
    """Return the columns of every parameter of a model; one ConfigError has all that is wrong with them."""
    columns_of = ColumnsOf(policy, model)
    rules.require_matches(policy.rules, model, columns_of.problems)
    columns = [columns_of(parameter) for parameter in model.parameters]
    columns_of.require_one_export(columns)
    columns_of.problems.raise_as(ConfigError)
    if not policy.mode.autocast:
        rules.require_one_compute(model, columns, policy.rules, columns_of.problems)
        columns_of.problems.raise_as(ConfigError)
    return columns


class ColumnsOf:
    """A cache of columns: `columns_of(parameter)` returns one object for equal inputs."""

    def __init__(self, policy: Policy, model: ModelSpec) -> None:
        self._policy = policy
        self._base: rules.Demands = {column: (value, why) for column, value, why in policy.demands}
        self._frozen = self._base.pop("frozen", None)
        self._checkpoint = dict(model.checkpoint)
        self._checkpoint_below = _dtypes_below(self._checkpoint)
        self._known: dict[Any, Columns] = {}
        matches = ((_COMPUTED_WITH.fullmatch(buffer.name), buffer.dtype) for buffer in model.buffers)
        self._statistics = {found["path"]: dtype for found, dtype in matches if found and dtype.is_floating}
        """Path of a module -> dtype of its statistics."""
        self._refused: set[str] = set()
        self._exported_wide: dict[str, None] = {}
        """Kinds of parameters that a narrow `export` of the config leaves as they are."""
        self.problems = Problems()

    def __call__(self, parameter: ParameterSpec) -> Columns:
        base, kept = self._base, ""
        if self._frozen is not None and not parameter.trained:
            kept = not_linear(parameter)
            base = base if kept else {**base, "storage": self._frozen}
        demands, matched = rules.demands(base, self._policy.rules, parameter)
        output = next((rule.output for rule in reversed(matched) if rule.output is not None), None)
        # A later rule may have changed a column of a pin.
        pinned = any(rule.pin for rule in matched) and all(
            demands.get(column, ("", ""))[0] == value for column, value in rules.PIN if column != "export"
        )
        if parameter.trained and not parameter.dtype.is_floating:
            must = "must be of real floating numbers to be trained"
            do = "Hold a complex one as `torch.view_as_real` of it, or freeze it before `initialize`."
            self.problems.add(parameter.name, must, got=parameter.dtype, do=do)
        safe, stacks = self._policy.safe, self._policy.experts
        stack = next((glob for glob in stacks if any(map(rules.glob(glob), parameter.names))), "")
        checkpoint = self._checkpoint_dtype(parameter)
        quantised = checkpoint is not None and checkpoint.format is not None
        exported_wide = self._decide_narrow_export(parameter, demands)
        asks_for_products = any(column.startswith("compute.") for column in demands)
        traits = ParameterTraits(
            parameter.dtype,
            parameter.trained,
            bool(safe) and all(_in_safe_list(owner.klass, safe) for owner in parameter.owners),
            checkpoint,
            len(parameter.shape),
            not_hidden(parameter) if uses_muon(self._policy) else "",
            f"experts: '{stack}'" if stack else "",
            kept,
            exported_wide,
            parameter.shape[-1] if quantised and parameter.shape else 0,
            *(narrow.why_without(parameter, _roles(parameter)) if asks_for_products else ()),
        )
        key = (tuple(demands.items()), output, pinned, traits)
        columns = self._known.get(key)
        if columns is None:
            columns = complete(demands, self._policy, traits, pinned, output, self.problems)
            self._known[key] = columns
        self._require_as_wide_as_buffers(parameter, columns)
        shape = narrow.template(parameter.name)
        if shape not in self._refused and not narrow.require_fit(parameter, columns, self.problems):
            self._refused.add(shape)
        return columns

    def _decide_narrow_export(self, parameter: ParameterSpec, demands: rules.Demands) -> str:
        """Give a demand for a narrow `export` its reason, or take it away and return why."""
        value, key = demands.get("export", ("fp32", ""))
        form = DType(value).format
        if form is None:
            return ""
        wide, is_choice = exported_wide(parameter, DType(value))
        if not wide or (is_choice and rules.is_by_rule(key)):
            source = "the master" if parameter.trained else "storage"
            demands["export"] = value, f"{key}: {form.describe()}, quantised from {source}"
            return ""
        if rules.is_by_rule(key):
            must = f"`export` must not be {value} where no library reads it: {wide}"
            self.problems.add(key, must, got=parameter.name, do="Use a plain dtype.")
        del demands["export"]
        self._exported_wide[wide] = None
        return f"; {key}: {value} is for linear layers, and this is {wide}"

    def require_one_export(self, columns: Sequence[Columns]) -> None:
        """Refuse a second narrow `export`, and one that suits no parameter."""
        found = tuple(dict.fromkeys(of.export for of in columns if of.export.format is not None))
        value, key = self._base.get("export", ("fp32", ""))
        if len(found) > 1:
            must = "must be one narrow format: a folder's config.json names one"
            self.problems.add("precision.export", must, got=" and ".join(map(str, found)))
        elif DType(value).format is not None and not found:
            must = "must suit a linear layer of the model"
            others = listed(tuple(self._exported_wide)) or "parameters with a rule"
            got = f"{value}, for a model with nothing but {others}"
            self.problems.add(key, must, got=got, do="Use another format, or a rule.")

    def _require_as_wide_as_buffers(self, parameter: ParameterSpec, columns: Columns) -> None:
        """Refuse parameters that compute in a narrower dtype than their module's statistics.

        Running statistics and the vectors of a spectral norm keep their dtype, and torch computes them with
        the parameters in one dtype.
        """
        for owner in parameter.owners:
            path = owner.path.partition(".parametrizations.")[0]
            held = self._statistics.get(path)
            rule = f"match: '{path}.*'"
            if owner.klass.startswith("torch.nn.modules.batchnorm."):  # one rule, and one error, for all
                rule = f"class: torch.nn.{owner.klass.rpartition('.')[2]}"
            if rule in self._refused or held is None or not columns.compute.is_floating:
                continue
            if held.size > columns.compute.size:
                self._refused.add(rule)
                must = f"must compute in the dtype of its buffers, {held}: torch mixes no dtypes in it"
                do = f"Write the rule `{{{rule}, pin: fp32, output: input}}`."
                self.problems.add(path, must, got=columns.compute, do=do)

    def _checkpoint_dtype(self, parameter: ParameterSpec) -> DType | None:
        for name in parameter.names:
            if name in self._checkpoint:
                return self._checkpoint[name]
        paths = [owner.path for owner in parameter.owners]
        below = {dtype for path in paths for dtype in self._checkpoint_below.get(path, ())}
        return dtypes.widest(tuple(below)) if below else None


def _dtypes_below(checkpoint: Mapping[str, DType]) -> dict[str, set[DType]]:
    """Map module paths to the dtypes of the tensors below them.

    A model may merge tensors of a file: `experts.gate_up_proj` for `experts.0.gate_proj.weight` and the rest.
    """
    below: dict[str, set[DType]] = {}
    for path, dtype in checkpoint.items():
        while "." in path:
            path = path.rpartition(".")[0]
            below.setdefault(path, set()).add(dtype)
    return below


@functools.lru_cache(maxsize=4096)
def _in_safe_list(klass: str, safe: tuple[str, ...]) -> bool:
    return any(rules.is_class(klass, wanted) for wanted in safe)


def not_hidden(parameter: ParameterSpec) -> str:
    """Return why a parameter is no hidden matrix by any of its names, or `""` for a hidden matrix."""
    if len(parameter.shape) < 2:
        return "a vector, no matrix" if parameter.shape else "a single number"
    return _roles(parameter)


def _roles(parameter: ParameterSpec) -> str:
    """Return the first role of a parameter by any of its names, or `""` for none of the listed roles."""
    for name, owner in zip(parameter.names, parameter.owners, strict=True):
        role = _role(name, owner.klass.rpartition(".")[2])
        if role:
            return role
    return ""


def not_linear(parameter: ParameterSpec) -> str:
    """Return why a parameter is no weight of a linear layer by any of its names, or `""` for one.

    A stack of more than two dimensions counts as one, as experts are; so does a matrix without a known class.
    """
    owners = (
        {owner.klass.rpartition(".")[2] for owner in parameter.owners} if len(parameter.shape) == 2 else ()
    )
    others = (klass for klass in owners if klass and "Linear" not in klass and klass != "Conv1D")
    return not_hidden(parameter) or next((f"a matrix of {klass}, no linear layer" for klass in others), "")


def exported_wide(parameter: ParameterSpec, dtype: DType) -> tuple[str, bool]:
    """Return why a narrow `export` leaves a parameter as it is, or `""`, and whether a rule may change that.

    Libraries that read such files know narrow `nn.Linear` and stacked experts, and nothing else.
    """
    shape, role = parameter.shape, not_hidden(parameter)
    owners = {owner.klass.rpartition(".")[2] for owner in parameter.owners} - {"", "Linear"}
    if len(shape) < 2:
        return role, False
    if len(shape) == 2 and owners:
        return role or f"a matrix of {min(owners)}, no `nn.Linear`", False
    if len(shape) > 2 and (role or dtype is DType.NF4_64):
        return role or "a stack, and bitsandbytes knows single matrices", False
    cut = "" if dtype is not DType.FP8_128X128 else cut_tiles(shape)
    return role or cut, True


def cut_tiles(shape: Sequence[int]) -> str:
    """Return why a matrix in tiles of 128x128 is misread, or `""`.

    `transformers` divides the dimension by the number of its tiles: 192 rows are two tiles of 96 to it.
    Where that leaves a rest, it raises instead.
    """
    for size in shape[-2:]:
        tiles = -(-size // 128)
        if size > 128 and size % 128 and size % tiles == 0:
            return (
                f"a matrix with a dimension of {size}, which `transformers` reads in tiles of {size // tiles}"
            )
    return ""


def exported_as(dtype: DType | None, parameter: ParameterSpec, columns: Columns | None) -> DType:
    """Return the dtype of a parameter in an export; `dtype` replaces the `export` column, if there is one.

    Without columns the parameter keeps its own dtype. A narrow `dtype` leaves what a rule decides.
    """
    usual = parameter.dtype if columns is None or not parameter.dtype.is_floating else columns.export
    if dtype is None or not usual.is_floating or (columns is not None and columns.pinned):
        return usual
    if dtype.format is not None:
        is_ruled = columns is not None and rules.is_by_rule(columns.reasons()["export"])
        return usual if is_ruled or exported_wide(parameter, dtype)[0] else dtype
    return dtype


def _role(name: str, klass: str) -> str:
    """Return the role of a parameter by its name and its module's class; `""` for none of the listed roles.

    The name counts too, because gpt-oss stacks the biases of its experts into two dimensions.
    """
    parts = name.lower().split(".")
    module = parts[-2] if len(parts) > 1 else ""
    roles = {
        "an embedding": klass.startswith("Embedding") or "embed" in name.lower() or module in ("wte", "wpe"),
        "an output head": module in HEADS,
        "a router": any(part in ROUTERS for part in parts),
        "a bias": parts[-1].endswith("bias"),
        "a norm": "norm" in module,
        "a convolution": _CONVOLUTION.fullmatch(klass) is not None,
    }
    return next((role for role, fits in roles.items() if fits), "")
