"""All columns of a parameter from the demands on it, each with a reason.

Columns that the config leaves open are filled in one order: storage, compute, gather, accumulate, reduce,
master, state, export. Every default has its reason. Every unsupported column is a problem that names the key
which set it. `_ColumnFiller` has a method per column in that order; read it for the defaults.

Invariant: `complete` is a pure function of its arguments, and its result needs no further decision.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from zerodrift.dtypes import DType, lost
from zerodrift.errors import Problems
from zerodrift.optimizers import of_type
from zerodrift.policy import narrow
from zerodrift.policy.backends import BACKENDS
from zerodrift.policy.decisions import (
    COLUMNS,
    OPTIONS,
    Axis,
    Columns,
    ComponentSpec,
    Exclusion,
    LinearProducts,
    Master,
    Mode,
    MuonUpdate,
    Output,
    Placed,
    Placement,
    Policy,
    Reduction,
    State,
    Update,
    uses_muon,
)
from zerodrift.policy.order import CARRIED, WIRE, refuse_order
from zerodrift.policy.rules import PRODUCTS, Demands, is_by_rule
from zerodrift.policy.support import DEFAULT_ACCUMULATE, gradient_dtype, why_not_state, why_not_storage

VECTOR = "a vector: too few bytes to save"


@dataclass(frozen=True, slots=True)
class ParameterTraits:
    source: DType
    trained: bool
    safe: bool
    """Autocast only: every module that owns the parameter is in the safe list."""
    checkpoint: DType | None
    dimensions: int
    not_hidden: str
    """Why Muon leaves the parameter to AdamW by default; `""` for a hidden matrix."""
    expert: str = ""
    """Why the parameter is divided over the expert axis; `""` if it is not."""
    not_linear: str = ""
    """Why `precision.frozen` leaves the parameter as it is; `""` without that key, and for linear layers."""
    exported_wide: str = ""
    """Why a narrow `export` leaves the parameter as it is; `""` without one."""
    columns: int = 0
    """The last dimension, where the checkpoint is quantised."""
    no_product: str = ""
    """Why the parameter is not multiplied with an activation; `""` for a matrix."""
    usual_product: str = ""
    """Why the parameter's products keep the compute dtype unless a rule says otherwise, or `""`."""


def complete(
    demands: Demands,
    policy: Policy,
    traits: ParameterTraits,
    pinned: bool,
    output: Output | None,
    problems: Problems,
) -> Columns:
    """Decide every column of a parameter."""
    if traits.source.is_floating:
        fill = _ColumnFiller(demands, policy, traits, problems)
        storage = fill.storage()
        compute = fill.compute()
        gather = fill.gather(storage, compute)
        update = fill.update(storage, compute) if traits.trained else None
        export = fill.export(compute)
        products = fill.products(compute)
        why = tuple((name, fill.why[name]) for name in (*COLUMNS, *OPTIONS) if name in fill.why)
        placed = Placed(storage, fill.storage_axis)
        asked = tuple((key, by) for key, (_, by) in fill.demands.items() if key in (*COLUMNS, "reduce.wire"))
        columns = Columns(placed, gather, compute, update, export, output, pinned, why, "", products, asked)
        BACKENDS[policy.backend].refuse_columns(columns, fill.place, problems)
    else:  # an integer or boolean parameter keeps its dtype
        dtype = traits.source
        reason = f"{dtype} is not a floating-point dtype: not cast"
        why = tuple((column, reason) for column in ("storage", "gather", "compute", "export"))
        columns = Columns(Placed(dtype, ""), dtype, dtype, None, dtype, output, False, why)
    if not traits.expert:
        return columns
    return replace(columns, parallel="expert", why=(*columns.why, ("parallel", traits.expert)))


class _ColumnFiller:
    def __init__(self, demands: Demands, policy: Policy, traits: ParameterTraits, problems: Problems) -> None:
        self.demands, self.policy, self.traits, self.problems = demands, policy, traits, problems
        self.why: dict[str, str] = {}
        self._mode, self._stage = policy.mode, policy.sharding.stage
        self._backend = BACKENDS[policy.backend]
        self._kept_wide = ""
        """Clause that says why the config's narrow gather leaves this parameter out; `""` if it does not."""
        self._encoded = self._narrow_gather()
        """The narrow format that the config asks for and that suits this parameter."""

    @property
    def storage_axis(self) -> Axis:
        return "shard" if self._stage == 3 or self._backend.storage_sharded else ""

    def _text(self, column: str, default: str, reason: str) -> str:
        value, self.why[column] = self.demands.get(column, (default, reason))
        return value

    def _demanded(self, column: str, default: DType, reason: str) -> DType:
        return DType(self._text(column, default.value, reason))

    def place(self, column: str) -> str:
        """Return the key that set a column, for messages; the mode's key if none did."""
        return self.demands[column][1] if column in self.demands else "precision.mode"

    def _refuse(self, column: str, must: str, got: object = "", do: str = "") -> None:
        self.problems.add(self.place(column), must, got=got, do=do)

    def _exclude(self, refusal: Exclusion, got: object) -> None:
        self._refuse(refusal.column, refusal.must, got, refusal.do)

    def _narrow_gather(self) -> DType | None:
        value, key = self.demands.get("gather", ("", ""))
        dtype = DType(value) if value else None
        if dtype is None or dtype.format is None:
            return None
        if self.traits.trained and not self._is_vector_by_default(key):
            return dtype
        reason = VECTOR if self.traits.trained else "frozen: it never changes"
        if not self.traits.trained and is_by_rule(key):
            self._exclude(narrow.FROZEN, dtype)
        self.demands = {column: pair for column, pair in self.demands.items() if column != "gather"}
        self._kept_wide = f"; {reason}, so not {dtype}"
        return None

    def _is_vector_by_default(self, key: str) -> bool:
        """Return True for a vector where the config asks for a narrow format of all parameters."""
        return self.traits.dimensions < 2 and not is_by_rule(key)

    def storage(self) -> DType:
        mode, source = self._mode, self.traits.source
        if self._encoded is not None and self.storage_axis:
            reason = f"`gather` is {self._encoded}: it is encoded from fp32 values"
            storage = self._demanded("storage", DType.FP32, reason)
            if storage is not DType.FP32:
                self._exclude(narrow.STORAGE, storage)
            return storage
        if mode.autocast:
            default, reason = DType.FP32, f"mode {mode}: parameters are stored in fp32"
        elif self._backend.storage_fp32 and mode is not Mode.FP32:
            default, reason = DType.FP32, self._backend.storage_fp32
        else:
            default, reason = mode.dtype, f"mode {mode}"
        if not self.traits.trained and source is not default and default.holds(source):
            default, reason = source, f"frozen: {source} as it came, widening would add no bits"
        if self.traits.not_linear:
            reason += f"; `precision.frozen` is for linear layers, and this is {self.traits.not_linear}"
        storage = self._demanded("storage", default, reason)
        if storage.format is not None:
            if reason := why_not_storage(self.traits.trained, self._backend.name):
                do = "`precision.frozen` is only for frozen parameters." if self.traits.trained else ""
                self._refuse("storage", f"`storage` must not be {storage} here: {reason}", do=do)
            self.why["storage"] += f": {storage.format.describe()}, {self._coded(storage)}"
        return storage

    def _coded(self, storage: DType) -> str:
        """Say where the codes of a narrow storage come from."""
        checkpoint = self.traits.checkpoint
        if checkpoint is None:
            return f"quantised from the model's own {self.traits.source} values"
        source, form = checkpoint.format, storage.format
        if source is not None and form is not None and form.keeps(source, self.traits.columns):
            return "with the codes and scales of the checkpoint"
        decoded = " decoded in fp32" if source is not None else " values"
        return f"quantised from the checkpoint's {checkpoint}{decoded}"

    def compute(self) -> DType:
        mode = self._mode
        default, reason = mode.dtype, f"mode {mode}"
        if mode.autocast and self.traits.safe:
            reason = "autocast: every module that owns it is in the safe list"
        elif mode.autocast:
            default, reason = DType.FP32, "autocast: not a safe module, each op's autocast rule decides"
        compute = self._demanded("compute", default, reason)
        if compute is DType.FP16 and not mode.scaled and self.traits.trained:
            must = "`compute` must not be fp16 in a mode without a loss scale: small gradients vanish"
            self._refuse("compute", must, f"mode {mode}", "Use mode fp16, or bf16 here.")
        return compute

    def products(self, compute: DType) -> LinearProducts | None:
        """Return the products that the config asks for; None where all operands are in the compute dtype."""
        asked = {part: self.demands.get(f"compute.{part}", (compute.value, "")) for part in PRODUCTS}
        cells = {part: DType(value) for part, (value, _) in asked.items()}
        for part, dtype in cells.items():
            if dtype.format is None and dtype is not compute:
                must = f"`compute.{part}` must be fp8 or the compute dtype, {compute}"
                self._refuse(f"compute.{part}", must, dtype, "The other operands are in that dtype.")
        keys = list(dict.fromkeys(asked[part][1] for part in PRODUCTS if cells[part].format is not None))
        if not keys:
            return None
        by_rule = any(map(is_by_rule, keys))
        left = self.traits.no_product or ("" if by_rule else self.traits.usual_product)
        if left:
            self.why["products"] = f"{left}: `{keys[0]}` is not for it"
            return None
        pad, pad_why = self.demands.get("compute.pad", ("false", ""))
        self.why["products"] = "; ".join(dict.fromkeys([*keys, *filter(None, [pad_why])]))
        return LinearProducts(cells["forward"], cells["grad_input"], cells["grad_weight"], pad == "true")

    def gather(self, storage: DType, compute: DType) -> DType:
        if storage.format is not None:
            said = self.demands.get("gather", (storage.value, ""))[0]
            if said != storage.value and self.place("gather") != "precision.gather":
                must = f"`gather` must be the storage format, {storage}: codes are gathered as stored"
                self._refuse("gather", must, said, "Leave `gather` out.")
            self.why["gather"] = f"{storage} is gathered as it is stored, and is decoded for each use"
            return storage
        if self._encoded is not None:
            key = self.demands["gather"][1]
            after = "gathered once after each update" if not self.storage_axis else "encoded at each gather"
            source = "storage" if self.storage_axis else "the fp32 master"
            self.why["gather"] = f"{key}: {source} is the source, {after}"
            return self._encoded
        if not self.storage_axis:
            reason = f"stage {self._stage}: storage is whole, an updated slice is sent as stored"
            gather = self._demanded("gather", storage, reason + self._kept_wide)
            if gather is not storage:
                whole = "where storage is whole and an updated slice is sent as stored"
                must = f"`gather` must be {storage} at stage {self._stage}, {whole}"
                self._refuse("gather", must, gather, "Leave `gather` out, or use stage 3.")
            return gather
        narrower = storage if compute.holds(storage) else compute
        reason = "the narrower of storage and compute"
        if self._backend.gather_compute:
            narrower, reason = compute, self._backend.gather_compute
        gather = self._demanded("gather", narrower, reason + self._kept_wide)
        if gather not in (storage, compute):
            must = f"`gather` must be the storage dtype ({storage}) or the compute dtype ({compute})"
            self._refuse("gather", must, gather, "Another dtype would round without need.")
        return gather

    def update(self, storage: DType, compute: DType) -> Update:
        grad = self._demanded("grad", compute, "autograd leaves it in the compute dtype")
        if grad is not compute:
            must = f"`grad` must be the compute dtype, {compute}: autograd leaves gradients in it"
            self._refuse("grad", must, grad, "Set `accumulate` for the dtype that gradients are summed in.")
        reason = "default: micro-batches are summed in fp32 in every mode"
        accumulate = self._demanded("accumulate", DEFAULT_ACCUMULATE, reason)
        self._allow("accumulate", accumulate, compute)
        reduce = self._reduce(accumulate)
        axis: Axis = "shard" if self._stage >= 1 else self.storage_axis
        optimizer = self._optimizer()
        return Update(
            grad=grad,
            accumulate=Placed(accumulate, "shard" if reduce.when == "every" else ""),
            reduce=reduce,
            master=self._master(storage),
            state=self._state(optimizer),
            axis=axis,
            placement=self._placement(optimizer),
            optimizer=optimizer,
        )

    def _reduce(self, accumulate: DType) -> Reduction:
        mode, stage = self._mode, self._stage
        order, order_why = self.demands["reduce.order"]
        if mode.autocast and self.traits.safe and order == "rank":
            default, reason = mode.dtype, "autocast: a safe module's gradients are sent in its dtype"
        else:
            default, reason = accumulate, "default: the accumulated gradient is sent unrounded"
        asked, key = self.demands.get("reduce.wire", ("", ""))
        if asked and DType(asked).format is not None and self._is_vector_by_default(key):
            self.demands = {name: pair for name, pair in self.demands.items() if name != "reduce.wire"}
            reason = f"{reason}; {VECTOR}, so not {asked}"
        wire = self._demanded("reduce.wire", default, reason)
        if "reduce.wire" in self.demands:
            self._allow("reduce.wire", wire, accumulate)
        total = self._demanded("reduce.sum", DType.FP32, "the ranks' gradients are summed in fp32")
        if wire.format is not None and total is not DType.FP32:
            self._exclude(narrow.SUM, total)
        if not total.holds(wire):
            must = f"`reduce.sum` must hold the wire dtype, {wire}"
            self._refuse("reduce.sum", must, total, "Use the wire's dtype or fp32.")
        usual = "last", f"stage {stage}: reduced once per step"
        if stage >= 2:
            usual = "every", f"stage {stage}: the accumulator is sharded, so each micro-batch is reduced"
        when, why = self.demands.get("reduce.when", usual)
        wire_why, sum_why = self.why.pop("reduce.wire"), self.why.pop("reduce.sum")
        self.why["accumulate"] += f"; {'sharded' if when == 'every' else 'whole'}, reduce.when is {when}"
        parts = {f"wire {wire}": wire_why, f"sum {total}": sum_why}
        if wire_why == sum_why:
            parts = {f"wire and sum {wire}": wire_why}
        parts |= {f"when {when}": why, f"order {order}": order_why}
        if self.policy.requires_tree and not accumulate is wire is total:
            refuse_order(WIRE, "precision.reduce.order", self.problems)
        if order == "native" and wire is not total:
            refuse_order(CARRIED, "precision.reduce.order", self.problems, "native")
        feedback = self._wire_option("reduce.feedback", "false", wire, narrow.NO_WIRE) == "true"
        if feedback:
            parts["feedback"] = self.place("reduce.feedback")
            if self._mode.scaled:
                self._exclude(narrow.SCALED, self._mode)
            elif accumulate is not DType.FP32:
                self._exclude(narrow.ACCUMULATE, accumulate)
        rounding = self._wire_option("reduce.rounding", "nearest", wire, narrow.NEAREST)
        if rounding != "nearest":
            parts[f"rounding {rounding}"] = self.place("reduce.rounding")
        self.why["reduce"] = "; ".join(f"{part}: {reason}" for part, reason in parts.items())
        return Reduction(wire, total, when, order, feedback, rounding)  # type: ignore[arg-type]

    def _wire_option(self, column: str, usual: str, wire: DType, refusal: Exclusion) -> str:
        """Return an option of the wire. A plain wire has the usual one, and no rule may ask for another."""
        asked, key = self.demands.get(column, (usual, ""))
        if wire.format is not None or asked == usual:
            return asked
        if is_by_rule(key):
            self._exclude(refusal, wire)
        return usual

    def _allow(self, column: str, dtype: DType, of: DType) -> None:
        """Refuse a gradient column that loses bits of the column before it, unless the config allows that."""
        if not lost(of, dtype):
            return
        name, mode = column.partition(".")[0], self._mode
        verdict = gradient_dtype(mode, dtype)
        if verdict.status == "no":
            self._refuse(column, f"`{name}` must not be {dtype} in mode {mode}: {verdict.reason}")
        elif column == "accumulate" and not self.policy.allow_narrow:
            losses = " and ".join(lost(of, dtype))
            must = f"`accumulate` must hold the compute dtype, {of}: {dtype} loses {losses}"
            self._refuse(column, must, dtype, "Set `precision.allow_narrow: true` to allow that.")

    def _master(self, storage: DType) -> Master:
        if self._encoded is not None and not self.storage_axis:
            why = f"storage has the values rounded to {self._encoded}: a copy in fp32 is the source"
            master = Master(self._text("master", Master.FP32.value, why))
            if master is not Master.FP32:
                self._exclude(narrow.MASTER, master)
            return master
        if storage is DType.FP32:  # a second copy in fp32 would be the same bits
            why = "storage is fp32: it is its own master"
            value, key = self.demands.get("master", ("same", ""))
            self.why["master"] = why if value == "same" and not key else f"{key}; {why}"
            return Master.SAME
        default, reason = Master.SPLIT, "bf16 storage holds the high half: exact fp32 in 16 more bits"
        if storage is not DType.BF16:
            default = Master.FP32
            reason = f"{storage} storage cannot hold half of an fp32 value: a copy in fp32"
        master = Master(self._text("master", default.value, reason))
        if master is Master.SPLIT and storage is not DType.BF16:
            must = "`master: split` must have bf16 storage, whose bits are the high half of an fp32 value"
            got = f"storage {storage} in mode {self._mode}"
            self._refuse("master", must, got, "Use `master: fp32`.")
        return master

    def _optimizer(self) -> MuonUpdate:
        """Return the part of Muon that updates the parameter; `""` under any other optimizer."""
        if not uses_muon(self.policy):
            if "optimizer" in self.demands:
                same = "every parameter gets the same update"
                must = f"`optimizer` must be left out of rules without `optimizer.type: Muon`: {same}"
                do = "Remove it, or name Muon in the `optimizer` block."
                self._refuse("optimizer", must, self.demands["optimizer"][0], do)
            return ""
        traits = self.traits
        default: MuonUpdate = "AdamW" if traits.not_hidden else "Muon"
        reason = f"Muon's rule: {traits.not_hidden or 'a hidden matrix'}"
        value = self._text("optimizer", default, reason)
        if value == "Muon" and traits.dimensions < 2:
            must = "`optimizer: Muon` must be for matrices"
            do = "Use `optimizer: AdamW`, or a rule that matches less."
            self._refuse("optimizer", must, f"a parameter with {traits.dimensions} dimensions", do)
        return "Muon" if value == "Muon" else "AdamW"

    def _placement(self, optimizer: MuonUpdate) -> Placement:
        """Return the places where a slice may end."""
        stacked = self.traits.dimensions > 2
        default, reason = "sliced", ""
        if optimizer == "Muon":
            default = "matrices" if stacked else "whole"
            reason = "Muon works on whole matrices" + ("; a stack may be cut between them" if stacked else "")
        value, why = self.demands.get("placement", (default, reason))
        if value == "matrices" and not stacked:
            value, why = "whole", f"{why}; one matrix" if "placement" in self.demands else why
        if value == "sliced":
            if optimizer == "Muon":
                must = "`placement` must be `matrices` or `whole` where Muon updates: it needs whole matrices"
                do = "Leave `placement` out, or say `optimizer: AdamW`."
                self._refuse("placement", must, "sliced", do)
            return "sliced"
        self.why["placement"] = why
        return "matrices" if value == "matrices" else "whole"

    def _state(self, optimizer: MuonUpdate) -> State:
        state = State(self._text("state", "fp32", "default: moments in fp32"))
        beta2 = None if optimizer == "Muon" else _beta2(self.policy.optimizer)
        backend = self._backend
        if reason := why_not_state(state, backend.name, beta2):
            got = f"backend {backend.name}" if backend.refuse_state(state) else f"beta2 {beta2}"
            self._refuse("state", f"`state` must not be {state} here: {reason}", got)
        return state

    def export(self, compute: DType) -> DType:
        checkpoint = self.traits.checkpoint
        default, reason = compute, "no source checkpoint: the compute dtype"
        if checkpoint is not None and checkpoint.format is not None:
            reason = f"compute: {checkpoint} of the source, decoded"
        elif checkpoint is not None and checkpoint.is_floating and checkpoint.size > 1:
            default, reason = checkpoint, "the dtype of the source checkpoint"
        elif checkpoint is not None:
            reason = f"compute: {checkpoint} of the source has no meaning without its scales"
        elif self._mode.autocast:
            default, reason = DType.FP32, "no source checkpoint: autocast trains fp32 weights"
        return self._demanded("export", default, reason + self.traits.exported_wide)


def _beta2(optimizer: ComponentSpec | None) -> float | None:
    """Return the decay of the optimizer's second moment, or None without one; Muon's AdamW has one."""
    if optimizer is None:
        return None
    algorithm = of_type(optimizer.type).rest or of_type(optimizer.type)
    if not algorithm.beta2:
        return None
    return float(json.loads(optimizer.params).get("betas", algorithm.defaults["betas"])[1])
