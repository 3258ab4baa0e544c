"""Real architectures train the same bits at stages 0 and 3, with activation checkpointing and without."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.runs import Run, config, finish, make, same
from tests.ranks.harness import on_ranks
from zerodrift.engine.engine import Engine

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

from tests.models.architectures import ARCHITECTURES, labelled, recompute, rules, some, tokens
from zerodrift.train.tools.sample import cache_name

STEPS = 4
Case = tuple[int, bool | None]
"""Stage; no activation checkpointing, or its `use_reentrant`."""

SOME: list[Case] = [(0, None), (0, False), (3, None), (3, True)]
ALL: list[Case] = [*SOME, (0, True), (3, False)]


def train(engine: Engine, steps: int) -> Run:
    run = Run()
    for step in range(steps):
        loss = engine(**labelled(step % 2, engine.mesh.rank()), use_cache=False).loss
        engine.backward(loss)
        run.losses.append(loss.item())
        run.norms.append(engine.step().grad_norm)
    return finish(engine, run)


def look(engine: Engine, name: str) -> tuple[torch.Tensor, float]:
    """Return the tokens that the model continues a prompt with, and the loss of a step after that."""
    engine.eval()
    length = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    generated = engine.module.generate(tokens(0)[:, :4], **length)
    assert generated.shape == (2, 8)
    assert not any(segment.is_full for segment in engine.executor.segments if segment.gathers)
    engine.train()
    loss = engine(**labelled(0, engine.mesh.rank())).loss
    engine.backward(loss)
    assert engine.step().updated
    assert [unit.name for unit in engine.plan.units] == ["", "model.layers.0", "model.layers.1"]
    pinned = [row.name for row in engine.plan.rows if row.columns.pinned]
    assert bool(pinned) == bool(rules(name))
    assert all(engine.module.get_parameter(each).dtype is torch.float32 for each in pinned)
    return generated, loss.item()


@pytest.mark.parametrize(
    ("mode", "cases"),
    [("bf16", SOME), pytest.param("fp32", ALL, marks=pytest.mark.slow)],
    ids=["bf16", "fp32"],
)
@pytest.mark.parametrize("name", some("qwen3-moe"))
@on_ranks(2, timeout=200)
def test_stages_and_checkpointing_are_the_same_bits(name: str, mode: str, cases: list[Case]) -> None:
    runs, looks = [], []
    for stage, reentrant in cases:
        model = ARCHITECTURES[name].model()
        if reentrant is not None:
            recompute(model, reentrant)
        forwards: list[int] = []
        first = model.model.layers[0].input_layernorm
        first.register_forward_hook(lambda *_, calls=forwards: calls.append(1))
        engine = make(config(stage, mode, precision={"rules": rules(name)}), model)
        runs.append(train(engine, STEPS))
        assert len(forwards) == STEPS * (1 if reentrant is None else 2), "checkpointing recomputes"
        if reentrant is None:
            looks.append(look(engine, name))
    assert same(runs) == [], same(runs)
    (tokens_of_one, loss), *others = looks
    assert all(torch.equal(tokens_of_one, each) and loss == other for each, other in others)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sampler_hands_the_librarys_cache_on(name: str) -> None:
    model, ids, cache = ARCHITECTURES[name].model().eval(), tokens(0), cache_name(ARCHITECTURES[name].model())
    before = model(input_ids=ids[:, :-1], use_cache=True)
    after = model(input_ids=ids[:, -1:], use_cache=True, **{cache: getattr(before, cache)})
    torch.testing.assert_close(after.logits[:, -1], model(input_ids=ids).logits[:, -1])
