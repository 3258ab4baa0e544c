"""`zerodrift drift`: judgements of tensors, files, comparisons of sides, and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.models.planted_sides import PlantedSide, head_in_fp32, lively, named_first, token_ids
from tests.unit.refusals import error_of
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, ModelError, NonFiniteError, UnsupportedError, ZerodriftError
from zerodrift.inspect.audit.tokens import parse_recorded as recorded
from zerodrift.inspect.audit.tokens import read_ids, read_recorded
from zerodrift.inspect.drift.attribution import SamplerSide, SideComparison, compare_sides, share, token_drift
from zerodrift.inspect.drift.sampler import parse_sampler_dtypes as sampler
from zerodrift.inspect.drift.sampler import read_sampler_dtypes
from zerodrift.inspect.drift.tensor_status import judge, neighbours
from zerodrift.inspect.drift.text import comparison_json, comparison_text
from zerodrift.inspect.drift.trainer import TrainerSide
from zerodrift.inspect.drift.trainer import load_trainer as trainer
from zerodrift.optim.rounding import round_away

FP32, AUTOCAST = ({"precision": {"mode": mode}} for mode in ("fp32", "autocast-bf16"))
IDS = token_ids()[:2, :12].tolist()

# --- one tensor ---------------------------------------------------------------------------------------------


def matrix(seed: int = 0) -> Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))


def through(*dtypes: torch.dtype) -> Callable[[Tensor], Tensor]:
    def way(tensor: Tensor) -> Tensor:
        for dtype in dtypes:
            tensor = tensor.to(dtype)
        return tensor

    return way


def one_row(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[3] = changed[3].bfloat16().float()
    return changed


bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (lambda t: t, "same", "fp32"),
        (through(bf16), "rounded", "rounded to bf16"),
        (through(fp16), "rounded", "rounded to fp16"),
        (through(bf16, fp32), "rounded-otherwise", "bf16 on the way"),
        (one_row, "rounded-otherwise", "16 of 256 elements, in slice 3"),
        (lambda t: (t.view(torch.int32) & -65536).view(fp32).bfloat16(), "rounded-otherwise", "cut off"),
        (lambda t: neighbours(t, bf16)[1], "rounded-otherwise", "stochastic"),
        (lambda t: t.T.contiguous(), "transposed", "exchanged"),
        (lambda t: t.roll(1, 0).bfloat16(), "permuted", "dimension 0"),
        (lambda t: matrix(1).half(), "another-tensor", "`b`"),
        (lambda t: 0.5 * t, "scaled", "times 0.5"),
        (lambda t: t + 1e-3, "other-values", "256 of 256"),
        (lambda t: torch.where(t > 2, math.nan, t), "not-finite", "inf or nan"),
    ],
)
def test_a_tensor_is_told_for_what_became_of_it(
    change: Callable[[Tensor], Tensor], kind: str, told: str
) -> None:
    verdict = judge(matrix(), change(matrix()), {"b": matrix(1)})
    assert verdict.kind == kind and told in verdict.told


def test_what_a_dtype_cannot_hold_is_told() -> None:
    large, small = matrix(), matrix() * 1e-6
    large[0, 0] = 1e5
    lost = torch.where(small.half().abs() < torch.finfo(fp16).tiny, 0, small.half())
    assert judge(large, large.half()).kind == "overflowed"
    assert "largest" in judge(large, large.clamp(-65504, 65504).half()).told
    assert "subnormal" in judge(small, lost).told and judge(small, small.half()).kind == "rounded"


def test_of_two_values_as_near_either_is_rounded() -> None:
    """torch rounds ties to even, a split master away from zero."""
    halfway = torch.tensor([1 + 2**-8, -1 - 2**-8, 0.7])
    split = round_away(halfway)
    assert not torch.equal(split, halfway.bfloat16()) and judge(halfway, split).kind == "rounded"
    split[2] = neighbours(halfway, bf16)[1][2]
    assert judge(halfway, split).kind == "rounded-otherwise" and judge(halfway, split).differ == 1
    assert judge(torch.tensor(1 + 2**-8), torch.tensor(1 + 2**-7).bfloat16()).kind == "rounded"


# --- numbers ------------------------------------------------------------------------------------------------


def test_apart_is_what_a_plain_loop_says() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (-torch.rand(101, generator=generator, dtype=torch.float64) for _ in range(2))
    found, gaps = token_drift(b, a), [float(y - x) for x, y in zip(a, b, strict=True)]
    far = sorted(map(abs, gaps))
    assert found.mean_abs == pytest.approx(sum(far) / 101, rel=1e-12)
    assert found.rms == pytest.approx(math.sqrt(sum(gap**2 for gap in gaps) / 101), rel=1e-12)
    assert found.k3 == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / 101, rel=1e-12)
    assert (found.median, found.p99, found.largest) == (far[50], far[99], far[100])
    assert found.clipped == sum(abs(math.exp(gap) - 1) > 0.2 for gap in gaps) / 101


def test_what_is_not_finite_is_counted_and_not_averaged() -> None:
    a = torch.zeros(3, dtype=torch.float64)
    found = token_drift(torch.tensor([math.nan, 0.0, -1.0], dtype=torch.float64), a)
    assert (found.not_finite, found.mean_abs, share(found, found)) == (1, 0.5, 1.0)
    assert token_drift(a.clone(), a).rms == token_drift(a, a).k3 == 0.0


# --- the sampler's table, roles, files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("haed: fp32", "Did you mean `head`"),
        ("head: fp8_e4m3", "`head`: must be fp32, bf16 or fp16; got 'fp8_e4m3'"),
        ("compute: bf16\ncompute: fp32\n", "must be written once"),
    ],
)
def test_a_wrong_table_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "sampler.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_sampler_dtypes(tmp_path / "sampler.yaml")


def test_ids_come_from_every_kind_of_file(tmp_path: Path) -> None:
    rows, tensor = [[1, 2, 3], [4, 5, 6]], torch.tensor([[1, 2, 3], [4, 5, 6]])
    np.save(tmp_path / "a.npy", tensor.numpy().astype(np.int32))
    torch.save(tensor, tmp_path / "a.pt")
    save_file({"tokens": tensor}, tmp_path / "a.safetensors")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 2, 3], "logprobs": [null, -1.0, -2]}\n[4, 5, 6]\n\n')
    for end in ("npy", "pt", "safetensors", "json", "jsonl"):
        assert read_ids(tmp_path / f"a.{end}") == rows
    for bad, says in (
        ("[[1, 2.5]]", "must be a list of token ids"),
        ("[[1]]", "must be at least two tokens"),
    ):
        (tmp_path / "a.json").write_text(bad)
        with pytest.raises(ModelError, match=says):
            read_ids(tmp_path / "a.json")


VLLM = [None, {"2": {"logprob": -1.0, "rank": 1}, "9": {"logprob": -3}}, {"3": {"logprob": -2.0}}]
SGLANG = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]


@pytest.mark.parametrize(
    ("rows", "read"),
    [
        ([[None, -1.0, -2]], [-1.0, -2.0]),
        ([{"tokens": [1, 2, 3], "logprobs": [None, None, -2]}], [None, -2.0]),
        ([{"prompt_logprobs": VLLM}], [-1.0, -2.0]),
        ([{"input_token_logprobs": SGLANG}], [-1.0, -2.0]),
    ],
)
def test_recorded_numbers_of_every_form_are_read(rows: Any, read: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert recorded(rows, [[1, 2, 3]]) == read_recorded(tmp_path / "a.jsonl", [[1, 2, 3]]) == [read]


def test_recorded_numbers_that_do_not_fit_are_refused() -> None:
    for rows, says in (
        ([[-1.0]], r"recorded\[0\]`: must have 2 log-probabilities"),
        ([[0.5, -1.0]], r"recorded\[0\]\[1\]`: must be a finite log-probability, 0 or below; got 0.5"),
        ([{"tokens": [1, 2, 4], "logprobs": [-1.0, -1.0]}], "must be of the tokens that are compared"),
        ([[[-1.0, 2], [-2.0, 4]]], "numbers or null"),  # of another token
    ):
        with pytest.raises(ModelError, match=says):
            recorded(rows, [[1, 2, 3]])


def test_under_autocast_a_sampler_has_one_dtype() -> None:
    same = compared(plain(AUTOCAST), sampler={"softmax": "fp32"})
    assert same.whole.rms == 0.0 and same.cells == ()
    found = compared(plain(AUTOCAST), sampler={"compute": "bf16", "norms": "fp32"})
    assert named_first(found) == "compute" and found.whole.rms > 0


# --- two sides ----------------------------------------------------------------------------------------------


def folder_of(model: nn.Module, path: Path, dtype: torch.dtype = fp32, **changed: Tensor) -> Path:
    side = PlantedSide(model)
    tensors = {n: t.to(dtype) if "inv_freq" not in n else t for n, t in side.tensors.items()}
    path.mkdir(exist_ok=True)
    kept = {n: t.contiguous() for n, t in {**tensors, **changed}.items()}
    save_file(kept, path / "model.safetensors")
    return path


def plain(config: dict[str, Any] = FP32, name: str = "plain") -> TrainerSide:
    return trainer(config, lively(name))


def compared(side: TrainerSide | None = None, ids: Any = IDS, **known: Any) -> SideComparison:
    if isinstance(known.get("sampler"), dict):
        known["sampler"] = sampler(known["sampler"])
    return compare_sides(side or plain(), SamplerSide(**known), ids)


def test_sides_that_are_the_same_are_exactly_zero_apart(tmp_path: Path) -> None:
    sent = folder_of(lively("plain-moe"), tmp_path / "sent")
    found = compared(plain(FP32, "plain-moe"), sent=sent, loaded=sent, sampler={"compute": "fp32"})
    whole = found.whole
    assert (whole.mean_abs, whole.rms, whole.k3, whole.largest, whole.not_finite) == (0.0, 0.0, 0.0, 0.0, 0)
    assert found.within and found.cells == () and found.faults == () and named_first(found) == ""


def test_the_step_at_which_a_tensor_changed_is_named(tmp_path: Path) -> None:
    model, name = lively("plain"), "layers.0.attn.q.weight"
    turned = model.state_dict()[name].T.contiguous()
    sent = folder_of(model, tmp_path / "sent")
    loaded = folder_of(model, tmp_path / "loaded", **{name: turned})
    found = compared(sent=sent, loaded=loaded)
    (fate,) = found.faults
    digests = dict(fate.digests)
    assert (fate.name, fate.verdict.kind, fate.step) == (name, "transposed", "loaded")
    assert digests["trained"] == digests["sent"] != digests["loaded"]
    both = compared(sent=loaded, loaded=loaded)
    assert both.faults[0].step == "sent" and named_first(both) == name and not both.within


def test_cells_are_replayed_alone_and_left_out_alone(tmp_path: Path) -> None:
    table = sampler({"kv": "fp8_e5m2", "head": "bf16"})
    found = compared(sampler=table)
    of = {each.cell.key: each for each in found.cells}
    for key, other in (("kv", "head"), ("head", "kv")):
        alone = compared(sampler={key: {"kv": "fp8_e5m2", "head": "bf16"}[key]})
        assert of[key].alone == alone.whole
        assert of[other].removes == 1 - alone.whole.square / found.whole.square
    assert named_first(found) == "kv" and found.unexplained == 0.0
    assert compared(sampler={"head": "bf16", "tensors": {"head.*": "bf16", "*": "fp32"}}).cells == ()


def test_log_probabilities_alone_are_looked_for_among_dtypes(tmp_path: Path) -> None:
    side = PlantedSide(lively("plain"))
    head_in_fp32(side)
    folder = folder_of(side.model, tmp_path / "sent", bf16, **{"head.weight": side.tensors["head.weight"]})
    said = recorded(side.logprobs(folder, torch.tensor(IDS)), IDS)
    found = compared(trainer(side.config, side.model), recorded=said)
    best = found.tried[0]
    assert (best.key, best.dtype) == ("head", DType.FP32) and best.explains > 0.99
    assert found.unexplained == 1.0 and found.cells == ()


def test_flips_are_counted_apart_and_tokens_that_were_not_recorded_are_left_out() -> None:
    found = compared(plain(FP32, "plain-moe"), sampler={"router": "bf16"}, ids=token_ids().tolist())
    assert found.choices == 2 * token_ids().numel()
    assert sum(count for _, count in found.router_flips) == found.cells[0].flips
    assert 0 <= found.flipped_share <= 1
    found = compared(recorded=recorded([[None] * 8 + [-1.0] * 3, [-1.0] * 11], IDS), sampler={"kv": "bf16"})
    assert found.whole.tokens == 14


# --- what cannot be compared --------------------------------------------------------------------------------


class OtherLoss(nn.Embedding):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids).square().mean()


def renamed(path: Path) -> SideComparison:
    tensors = {n.replace("attn", "attention"): t for n, t in PlantedSide(lively("plain")).tensors.items()}
    save_file(tensors, path / "model.safetensors")
    return compared(sent=path)


def infinite() -> nn.Module:
    model = lively("plain")
    model.get_parameter("norm.weight").data[3] = math.inf
    return model


KV, MLP = {"kv": "bf16"}, "layers.0.mlp.0.weight"
SEVEN_SCALES = {MLP: torch.ones(64, 32, dtype=torch.int8), f"{MLP}_scale": torch.ones(7)}


def sent(**changed: Tensor) -> Callable[[Path], SideComparison]:
    return lambda path: compared(sent=folder_of(lively("plain"), path / "a", **changed))


REFUSED: list[tuple[type[ZerodriftError], Callable[[Path], SideComparison], str]] = [
    (ModelError, renamed, "must have the names of the trainer's model"),
    (ModelError, sent(**{"norm.weight": torch.ones(31)}), "`norm.weight`: must have shape [32]; got [31]"),
    (ModelError, sent(**SEVEN_SCALES), "must have a floating scale for all of it"),
    (
        NonFiniteError,
        lambda path: compared(trainer(FP32, infinite()), sampler=KV),
        "`norm.weight`: must be finite",
    ),
    (ModelError, lambda path: compared(sampler=KV, ids=[[1, 2, 96]]), "`tokens[0][2]`: must be a token"),
    (
        ModelError,
        lambda path: compared(trainer(FP32, OtherLoss(96, 8)), sampler=KV),
        "must take its loss from `cross_entropy`",
    ),
    (ConfigError, lambda path: compared(sampler={"router": "bf16"}), "`router`: must be of a parameter"),
    (UnsupportedError, lambda path: compared(plain(AUTOCAST), sampler={"head": "bf16"}), "must be fp32"),
]


@pytest.mark.parametrize(("error", "run", "says"), REFUSED)
def test_what_cannot_be_compared_is_refused(
    error: type[ZerodriftError], run: Callable[[Path], SideComparison], says: str, tmp_path: Path
) -> None:
    assert says in error_of(error, run, tmp_path)


# --- text and JSON ------------------------------------------------------------------------------------------


def test_text_and_json_name_faults_and_have_no_number_that_is_none(tmp_path: Path) -> None:
    model, name = lively("plain-moe"), "layers.1.mlp.experts.0.weight"
    changed = {name: model.state_dict()[name].T.contiguous(), "norm.weight": torch.full((32,), math.inf)}
    sent = folder_of(model, tmp_path / "a", **changed)
    faulty = compared(plain(FP32, "plain-moe"), sent=sent, sampler={"kv": "bf16"})
    text = comparison_text(faulty, [("trainer", "a/long/path/" * 12)], color=False, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("not what was trained") < text.index("what explains it")
    summary = "2 tensors not what was trained; 22 of 22 tokens without a finite log-probability"
    assert summary in " ".join(text.split()) and "layers.1.mlp.experts.0.weight  transposed" in text
    data = json.loads(comparison_json(faulty), parse_constant=pytest.fail)
    assert {each["kind"] for each in data["tensors"]["not_as_trained"]} == {"transposed", "not-finite"}
    assert data["within"] is False and data["drift"]["mean_abs"] is None
    assert data["tensors"]["digests"].keys() == model.state_dict().keys()
