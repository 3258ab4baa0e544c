"""Real architectures under every pipeline schedule: gradients against fp64, no parameter left out."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.architectures import ARCHITECTURES, SIZES, recompute, tokens
from tests.ranks.ways import WAYS
from zerodrift.api import empty, initialize
from zerodrift.config.load import load
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError
from zerodrift.mesh import MeshShape
from zerodrift.model.sources import describe
from zerodrift.pipeline.cut import CAUSAL, OLDER, TESTED_SINCE, Causal, prune
from zerodrift.plan.build import build
from zerodrift.plan.stages import activation_dtype, activation_width, names_of
from zerodrift.policy.resolve import resolve
from zerodrift.versions import numbers

COUNT = 4


def model(name: str, layers: int = 4) -> nn.Module:
    """As many layers as two ranks with two pieces each need."""
    small = ARCHITECTURES[name].model()
    changed = copy.deepcopy(small.config)
    changed.num_hidden_layers = layers
    if getattr(changed, "layer_types", None):
        changed.layer_types = (changed.layer_types * layers)[:layers]
    if hasattr(changed, "mlp_layer_types") and changed.mlp_layer_types:
        changed.mlp_layer_types = (list(changed.mlp_layer_types) + ["sparse"] * layers)[:layers]
    torch.manual_seed(0)
    return type(small)(changed)


def reference(name: str, ranks: int) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss over all micro-batches of all ranks, in fp64 with plain torch."""
    exact = model(name).double()
    exact.config._experts_implementation = "eager"  # grouped products of torch know no fp64
    for rank in range(ranks):
        for micro in range(COUNT):
            ids = tokens(micro, rank)
            (exact(input_ids=ids, labels=ids, use_cache=False).loss / (COUNT * ranks)).backward()
    return {name: value.grad for name, value in exact.named_parameters() if value.grad is not None}


def pipeline(
    name: str, mode: str, stage: int, schedule: str, weights: str | None, made: nn.Module | None = None
) -> Engine:
    torch.set_num_threads(1)
    block: dict[str, Any] = {"stages": 2, "schedule": schedule, "micro_batches": COUNT}
    if weights is not None:
        block["weight_grads"] = weights
    architecture = ARCHITECTURES[name]
    rules = [{"match": architecture.routers, "pin": "fp32"}] if architecture.routers else []
    written = config(stage, mode, COUNT, precision={"rules": rules}, pipeline=block)
    return initialize(model(name) if made is None else made, config=written, device="cpu", quiet=True)


def micro_batches(rank: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(micro, rank), "labels": tokens(micro, rank)} for micro in range(COUNT)]


def gradients(
    name: str, mode: str, stage: int, ways: list[tuple[str, str | None]]
) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of each way."""
    found = {}
    for schedule, weights in ways:
        engine = pipeline(name, mode, stage, schedule, weights)
        engine.accumulate(micro_batches(engine.mesh.rank("data")))
        found[f"{schedule} {weights}"] = {
            row.name: engine.parameter(row.name).gradient for row in engine.plan.rows
        }
        engine.destroy()
    return found


def alone(name: str, mode: str) -> dict[str, torch.Tensor]:
    """The same without a pipeline, every gradient at once."""
    architecture = ARCHITECTURES[name]
    rules = [{"match": architecture.routers, "pin": "fp32"}] if architecture.routers else []
    engine = make(config(0, mode, COUNT, precision={"rules": rules}), model(name))
    for batch in micro_batches(0):
        engine.backward(engine(**batch).loss)
    found = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
    engine.destroy()
    return found


def errors(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Parameter -> relative error of its gradient, by norm; none is skipped."""
    assert seen.keys() == expected.keys()
    found = {name: (seen[name].double() - value.double()).norm() for name, value in expected.items()}
    return {
        name: float((error / expected[name].double().norm().clamp(min=1e-300)).nan_to_num(nan=float("inf")))
        for name, error in found.items()
    }


FEW: list[tuple[str, str | None]] = [("1f1b", None), ("zbv", "queue"), ("zbv", "autograd")]


def check(name: str, mode: str, ways: list[tuple[str, str | None]]) -> None:
    exact = reference(name, 1)
    (single,) = run_ranks(alone, 1, name, mode)
    own = errors(single, exact)
    first, _ = run_ranks(gradients, 2, name, mode, 0, ways, timeout=180.0)
    for way, seen in first.items():
        beside, against = errors(seen, single), errors(seen, exact)
        # A queue does not round its products to bf16: half an ulp of bf16, 2e-3, is all that it may differ
        # by.
        assert max(beside.values()) < (3e-3 if mode == "bf16" else 1e-6), (way, beside)
        # What is far from fp64 is so without a pipeline: bf16 sends tokens to other experts than fp64 does,
        # and some sums of fp32 cancel.
        far = {
            key
            for key, error in against.items()
            if error > max(1e-6, 1.02 * own[key] + 1e-3 * (mode == "bf16"))
        }
        assert far == set(), (way, far)


def passed_on(mode: str) -> list[tuple[int, int]]:
    """Bytes that leave each piece of this rank for the next, and what the plan says of them."""
    engine = pipeline("llama", mode, 0, "zbv", None)
    found = []

    def record(piece: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        values = activation_width(engine.plan)
        assert values is not None
        found.append((output.nbytes, activation_dtype(engine.plan).size * values * tokens(0).numel()))

    handles = [
        piece.register_forward_hook(record, with_kwargs=True)
        for piece in engine.executor.forwards
        if piece.number < 3
    ]
    engine.train_batch(micro_batches(0))
    for handle in handles:
        handle.remove()
    engine.destroy()
    return found


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast-bf16"])
def test_what_goes_from_piece_to_piece_is_what_the_plan_says(mode: str) -> None:
    for found in run_ranks(passed_on, 2, mode):
        assert len(found) >= COUNT
        for sent, planned in found:
            assert sent == planned == (2 if mode == "bf16" else 4) * tokens(0).numel() * SIZES["hidden_size"]


# --- activation checkpointing -----------------------------------------------------------------------------


def recomputed(name: str, mode: str, ways: list[tuple[str, str | None]]) -> list[str]:
    """What `recompute` changes; nothing but how often layers run."""
    wrong = []
    for schedule, weights in ways:
        found, runs = [], []
        for enabled in (False, True):
            made = model(name)
            if enabled:
                recompute(made)
            engine = pipeline(name, mode, 0, schedule, weights, made)
            calls: list[int] = []
            for part in engine.module.modules():
                if type(part).__name__.endswith("Attention"):
                    part.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            engine.train_batch(micro_batches(0))
            calls.clear()
            losses = engine.accumulate(micro_batches(0))
            runs.append(len(calls))
            gradients = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
            found.append((losses, gradients))
            engine.step()
            engine.destroy()
        here, (plain, other) = f"{schedule} {weights}", found
        wrong += [f"{here} runs {runs}"] if not 0 < 2 * runs[0] <= runs[1] else []
        wrong += [f"{here} losses"] if plain[0] != other[0] else []
        wrong += [f"{here} {key}" for key in plain[1] if not torch.equal(plain[1][key], other[1][key])]
    return wrong


@pytest.mark.parametrize(
    ("name", "mode"),
    [("llama", "fp32"), *(pytest.param(n, "bf16", marks=pytest.mark.slow) for n in ARCHITECTURES)],
)
def test_checkpointing_of_transformers_changes_no_bit(name: str, mode: str) -> None:
    ways = FEW if (name, mode) == ("llama", "fp32") else WAYS
    assert run_ranks(recomputed, 2, name, mode, ways, timeout=200) == [[]] * 2


QUICK = [("llama", "fp32"), ("gpt-oss", "bf16")]
"""(architecture, mode): embeddings tied across the pipeline; expert biases beside deferred expert weights."""


@pytest.mark.parametrize(("name", "mode"), QUICK)
def test_gradients_are_those_of_one_process_and_of_fp64(name: str, mode: str) -> None:
    check(name, mode, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_gradients_under_every_schedule(name: str, mode: str) -> None:
    check(name, mode, [way for way in WAYS if way not in FEW or (name, mode) not in QUICK])


def over_data(name: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for stage, schedule, weights in ((3, "zbv", "queue"), (2, "interleaved-zero-bubble", "autograd")):
        engine = pipeline(name, "fp32", stage, schedule, weights)
        engine.accumulate(micro_batches(engine.mesh.rank("data")))
        found[f"{stage} {schedule}"] = {
            row.name: engine.parameter(row.name).gradient for row in engine.plan.rows
        }
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_pipelines_average_over_their_data(name: str) -> None:
    """pp 2 x dp 2, every micro-batch reduced."""
    exact = reference(name, 2)
    plain = fp32_error(name)
    for seen in run_ranks(over_data, 4, name, timeout=180.0):
        for way, found in seen.items():
            for parameter, error in errors(found, exact).items():
                assert error < max(1e-6, 2 * plain[parameter]), (way, parameter, error)


def fp32_error(name: str) -> dict[str, float]:
    """What plain fp32 loses on the same data, in one process: sums that cancel lose more than others."""
    plain = model(name)
    for rank in range(2):
        for micro in range(COUNT):
            ids = tokens(micro, rank)
            (plain(input_ids=ids, labels=ids, use_cache=False).loss / (COUNT * 2)).backward()
    return errors({key: value.grad for key, value in plain.named_parameters()}, reference(name, 2))


MIXTURE: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4, "head_dim": 8},
    "gemma3_text": {
        "sliding_window": 4, "head_dim": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere2": {"sliding_window": 4},
    "phi": {"partial_rotary_factor": 0.5},
}  # fmt: skip
"""What makes the layers of a type differ from each other, or what it does before them."""


def of_type(kind: str, layers: int = 4, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {
            "vocab_size": SIZES["vocab_size"],
            "n_embd": 32,
            "n_layer": layers,
            "n_head": 4,
            "n_positions": 64,
        }
    else:
        mixed = MIXTURE if "moe" in kind or kind == "mixtral" else {}
        sizes = {**SIZES, "num_hidden_layers": layers, **mixed, **OWN.get(kind, {}), **more}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def in_pieces(made: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss, one piece after the other."""
    plan = build(
        resolve(load({"pipeline": {"stages": 4}, "optimizer": {"type": "AdamW"}}), MeshShape(pipeline=4)),
        describe(made),
        MeshShape(pipeline=4),
    )
    cut = Causal.of(made)
    assert cut.problem(batch) is None
    pieces = [prune(made, names_of(plan, piece), cut) for piece in range(4)]
    hidden = cut.first(pieces[0], batch)
    for piece in pieces[1:-1]:
        hidden = cut.middle(piece, hidden, batch)
    return cut.last(pieces[-1], hidden, batch)


def batch_of(ids: torch.Tensor) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def wrong_in_pieces(made: nn.Module, batch: dict[str, Any]) -> list[str]:
    """What of the loss and its gradients has not the model's own bits."""
    names, parameters = zip(*made.named_parameters(), strict=True)
    whole, cut = made(**batch, use_cache=False).loss, in_pieces(made, batch)
    pairs = zip(
        *(torch.autograd.grad(each, parameters, allow_unused=True) for each in (whole, cut)), strict=True
    )
    return [
        *([] if torch.equal(whole, cut) else ["loss"]),
        *(
            name
            for name, (one, two) in zip(names, pairs, strict=True)
            if (one is None) != (two is None) or (one is not None and not torch.equal(one, two))
        ),
    ]


ELSEWHERE = ("deepseek_v3", "gpt_oss")  # run in the schedules above


def is_cut(kind: str) -> bool:
    """Whether this version of `transformers` makes models of a type that can be cut."""
    is_new = numbers(transformers.__version__, TESTED_SINCE) >= numbers(TESTED_SINCE)
    return is_new or kind in OLDER


def cut_here(kinds: Iterable[str]) -> list[Any]:
    return [
        pytest.param(kind, marks=[] if is_cut(kind) else pytest.mark.skip("refused for this transformers"))
        for kind in kinds
    ]


@pytest.mark.parametrize("kind", [kind for kind in CAUSAL if kind not in ELSEWHERE])
def test_causal_models_compute_the_same_in_pieces(kind: str) -> None:
    """The pieces of the types that are accepted, one after the other, are the model, bit for bit."""
    made = of_type(kind).eval()
    if not is_cut(kind):
        with pytest.raises(UnsupportedError, match=rf"transformers {TESTED_SINCE} or later .* type {kind};"):
            Causal.of(made)
        return
    assert wrong_in_pieces(made, batch_of(tokens(0))) == []


@pytest.mark.parametrize("kind", cut_here(["granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]))
def test_the_loss_that_balances_experts_is_that_of_all_layers(kind: str) -> None:
    """Asked for in the batch or in the config, and refused in the batch where the config asks for it."""
    made = of_type(kind).eval()
    batch = batch_of(tokens(0))
    plain = made(**batch).loss
    asked = {**batch, "output_router_logits": True}
    assert wrong_in_pieces(made, asked) == [] and not torch.equal(made(**asked).loss, plain)
    made.config.output_router_logits = True
    assert wrong_in_pieces(made, batch) == [] and not torch.equal(made(**batch).loss, plain)
    off = {**batch, "output_router_logits": False}
    assert wrong_in_pieces(made, off) == [] and torch.equal(in_pieces(made, off), plain)


def test_other_keyword_arguments_are_the_models_own() -> None:
    ids = tokens(0)
    llama = of_type("llama").eval()
    positions = torch.arange(ids.shape[1]).flip(0).expand_as(ids)
    if is_cut("gpt2"):
        gpt = of_type("gpt2").eval()
        assert wrong_in_pieces(gpt, {**batch_of(ids), "token_type_ids": torch.ones_like(ids)}) == []
        assert wrong_in_pieces(gpt, {**batch_of(ids), "position_ids": positions}) == []
    assert wrong_in_pieces(llama, {**batch_of(ids), "position_ids": positions, "num_items_in_batch": 3}) == []
    embedded = llama.model.embed_tokens(ids).detach()
    assert wrong_in_pieces(llama, {"inputs_embeds": embedded, "labels": ids}) == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"output_hidden_states": True}, "`output_hidden_states`: must be off in a pipeline"),
        ({"output_attentions": True}, "`output_attentions`: must be off in a pipeline"),
        ({"use_cache": True}, "`use_cache`: must be left out"),
        *(({key: object()}, f"`{key}`: must be left out") for key in ("cache", "past_key_values")),
        ({"labels": None}, "`labels`: must be in every micro-batch"),
        ({"input_ids": None}, "`input_ids`: must be in every micro-batch"),
        ({"output_hidden_states": False, "use_cache": False}, ""),
    ],
)
def test_what_no_piece_can_do_is_said(more: dict[str, Any], told: str) -> None:
    problem = Causal().problem({**batch_of(tokens(0)), **more})
    assert str(problem or "").startswith(told) and (problem is None) == (not told)


def test_a_model_that_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"`model`: must be a causal language model .* got Linear\."):
        Causal.of(nn.Linear(2, 2))
    made = of_type("llama", 1)
    assert Causal.of(made) == Causal()
    made.config.output_hidden_states = True
    with pytest.raises(UnsupportedError, match=r"`config\.output_hidden_states`: must be off"):
        Causal.of(made)
    made.config.output_hidden_states = False
    made.forward = types.MethodType(lambda self, **batch: None, made)
    with pytest.raises(UnsupportedError, match=r"`model`: must have the forward of transformers"):
        Causal.of(made)

    class MineForCausalLM(type(of_type("llama", 1))):  # type: ignore[misc]
        def forward(self, **batch: Any) -> Any:
            return super().forward(**batch, output_hidden_states=True)

    with pytest.raises(UnsupportedError, match=r"got one of MineForCausalLM.s own"):
        Causal.of(MineForCausalLM(made.config))


FEW_KINDS = [
    kind for kind in ("gpt2", "phi", "gemma2", "gemma3_text", "olmoe", "glm4_moe", "qwen3") if is_cut(kind)
]


def trained_kinds(pipe: bool, first: int) -> dict[str, list[Any]]:
    """Losses and norms of two steps, at stages 0 and 3 by turns; experts with the loss that balances them."""
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    for number, kind in enumerate(FEW_KINDS, first):
        for stage in ((0, 3)[number % 2],):
            made = of_type(kind, 4, tie_word_embeddings=False).eval()
            if kind == "gpt2":
                made.lm_head.weight = nn.Parameter(made.lm_head.weight.detach().clone())
            more = {"output_router_logits": True} if kind == "olmoe" else {}
            written = config(stage, "fp32", COUNT, precision={"reduce": {"when": "last"}})
            batches = [{**batch, **more} for batch in micro_batches(0)]
            here: list[Any] = []
            if pipe:
                schedule = {"stages": 2, "schedule": "zbv" if stage else "1f1b", "micro_batches": COUNT}
                engine = initialize(made, config={**written, "pipeline": schedule}, device="cpu", quiet=True)
                for _ in range(2):
                    result = engine.train_batch(batches)
                    here += [*result.losses, result.step.grad_norm]
                engine.destroy()
            else:
                plain = make(written, made)
                for _ in range(2):
                    for batch in batches:
                        loss = plain(**batch).loss
                        plain.backward(loss)
                        here.append(loss.item())
                        norm = plain.step().grad_norm
                    here.append(norm)
                plain.destroy()
            found[f"{kind} {stage}"] = here
    return found


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_architectures_train_in_a_pipeline_as_without(first: int) -> None:
    (alone,) = run_ranks(trained_kinds, 1, False, first, timeout=120.0)
    for seen in run_ranks(trained_kinds, 2, True, first, timeout=240.0):
        assert [key for key, value in alone.items() if seen[key] != value] == []


def dropping(kind: str) -> nn.Module:
    """With dropout wherever the library has it, nothing tied, each layer recomputed."""
    made = of_type(kind)
    changed = copy.deepcopy(made.config)
    changed.tie_word_embeddings = False
    for key in vars(changed):
        if key.endswith(("pdrop", "dropout")):
            setattr(changed, key, 0.2)
    torch.manual_seed(0)
    made = type(made)(changed)
    recompute(made)
    return made.train()


def by_the_tree(kinds: Iterable[str], stages: int) -> list[tuple[Any, ...]]:
    """Losses and digests of three steps of each, in a pipeline or not."""
    torch.set_num_threads(1)
    found = []
    for kind in kinds:
        torch.manual_seed(3)
        block = {"stages": stages, "schedule": "interleaved", "micro_batches": COUNT}
        written = config(1, "bf16", COUNT, precision={"reduce": {"order": "tree"}}, pipeline=block)
        engine = initialize(dropping(kind), config=written, device="cpu", quiet=True)
        losses = [engine.train_batch(micro_batches(0)).losses for _ in range(3)]
        found.append((kind, losses, str(engine.digest())))
        engine.destroy()
    return found


@pytest.mark.long
def test_by_the_tree_dropout_is_that_of_the_whole_model() -> None:
    """gpt2 and phi drop behind their embeddings too, in a forward that every piece goes through."""
    kinds = [kind for kind in ("gpt2", "phi", "llama") if is_cut(kind)]
    (expected,) = run_ranks(by_the_tree, 1, kinds, 1, timeout=120)
    assert all(len(set(losses)) == 3 for _, losses, _ in expected), "each step draws others"
    assert run_ranks(by_the_tree, 2, kinds, 2, timeout=120) == [expected] * 2


def filled(name: str, folder: str) -> dict[str, torch.Tensor]:
    """Masters of a model built without memory: from files, or by its own code where there are none."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    with empty():
        made = model(name)
    block = {"stages": 2, "schedule": "1f1b", "micro_batches": COUNT}
    engine = initialize(
        made,
        config=config(3, "bf16", COUNT, pipeline=block),
        weights=folder or None,
        device="cpu",
        quiet=True,
    )
    here = {name for row in engine.part.rows for name in row.names}
    elsewhere = [row.name for row in engine.plan.rows if not here & set(row.names)]
    found = {row.name: engine.parameter(row.name).master for row in engine.plan.rows}
    result = engine.train_batch(micro_batches(engine.mesh.rank("data")))
    engine.destroy()
    assert all(dict(made.named_parameters())[key].is_meta for key in elsewhere)
    assert result.step.updated
    return found


def filled_alone(name: str, folder: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    with empty():
        made = model(name)
    engine = make(config(3, "bf16", COUNT), made, weights=folder or None)
    found = {row.name: engine.parameter(row.name).master for row in engine.plan.rows}
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_stages_fill_their_own_pieces_from_files_or_by_their_own_code(name: str, tmp_path: Path) -> None:
    model(name).save_pretrained(tmp_path)
    for folder in (str(tmp_path), ""):
        (expected,) = run_ranks(filled_alone, 1, name, folder)
        for seen in run_ranks(filled, 4, name, folder):
            assert seen.keys() == expected.keys()
            assert [key for key, value in expected.items() if not torch.equal(value, seen[key])] == []


def over_experts(name: str) -> list[tuple[dict[str, torch.Tensor], float | None]]:
    found = []
    for stage, schedule, weights in (
        (3, "zbv", "queue"),
        (0, "1f1b", None),
        (2, "interleaved-zero-bubble", "autograd"),
    ):
        block: dict[str, Any] = {"stages": 2, "schedule": schedule, "micro_batches": COUNT}
        if weights is not None:
            block["weight_grads"] = weights
        written = config(stage, "fp32", COUNT, pipeline=block, experts={"ranks": 2})
        engine = initialize(model(name), config=written, device="cpu", quiet=True)
        engine.accumulate(micro_batches(engine.mesh.rank("data")))
        gradients = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
        found.append((gradients, engine.step().grad_norm))
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "deepseek-v3"])
def test_a_pipeline_with_experts_on_several_ranks(name: str) -> None:
    """pp 2 x ep 2: the two data ranks of a stage hold different experts."""
    exact, plain = reference(name, 2), fp32_error(name)
    seen = run_ranks(over_experts, 4, name, timeout=240.0)
    for found in seen:
        for number, (gradients, norm) in enumerate(found):
            assert norm == seen[0][number][1]
            for parameter, error in errors(gradients, exact).items():
                assert error < max(1e-6, 2 * plain[parameter]), (number, parameter, error)
