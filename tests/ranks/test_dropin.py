"""The drop-in on ranks: models in pieces, full and local values, writes of one rank, boundaries.

Whole scripts beside a plain loop, and beside DeepSpeed, are in `tests/habits`.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import zerodrift.deepspeed as deepspeed
from tests.habits.networks import WIDTH, Seeded, square
from tests.ranks.harness import on_ranks
from zerodrift.deepspeed.parameters.shards import shard_of
from zerodrift.engine.habits.absent_parameter import AbsentParameter
from zerodrift.errors import ModelError, UnsupportedError


def config(stage: int, **rest: Any) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": adam, "zero_optimization": {"stage": stage}}
    return {**base, **rest}


def make(stage: int = 3, model: nn.Module | None = None, **rest: Any) -> Any:
    return deepspeed.initialize(model=model or Seeded(), config=config(stage, **rest))[0]


def data(seed: int = 0) -> torch.Tensor:
    rank = deepspeed.comm.get_rank()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank))


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        loss = square(engine(data(number)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Model(Seeded):
    """A model with a buffer, which initialises its parts in the usual ways."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.into, self.head = nn.Identity(), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.register_buffer("third", torch.tensor(1 / 3))
        self.apply(lambda module: isinstance(module, nn.Linear) and nn.init.orthogonal_(module.weight))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            else:
                parameter.data.uniform_(-1, 1)
        with torch.no_grad():
            self.blocks[0][0].weight.copy_(self.blocks[1][0].weight)
            self.blocks[1][0].weight[0] = 3.0
            self.blocks[2][0].weight.mul_(0.5)


@on_ranks(2)
def test_a_model_in_pieces_trains_as_one_that_was_whole() -> None:
    rank = deepspeed.comm.get_rank()
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(rank)
    with deepspeed.zero.Init():
        model = Model()
    for parameter in model.parameters():
        piece = shard_of(parameter)
        assert piece is not None and abs(2 * piece.flat.numel() - parameter.numel()) <= 1
        assert parameter.shape == parameter.ds_shape
        assert parameter.untyped_storage().nbytes() <= 8
    assert type(model.head.weight.data.shape) is torch.Size
    assert model.third.item() == plain.third.item()
    for ask in (
        model.head.weight.data.zero_,
        model.head.weight.sum,
        lambda: torch.save(model.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(ModelError, match=r"`(Linear|Model)\.\w+`: must be gathered when its values are"):
            ask()
    with deepspeed.zero.GatheredParameters(model.parameters()):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)  # rank 0's, bit for bit
    with pytest.raises(ModelError, match=r"forward of \w+`: must run in the engine"):
        model(data())
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert torch.equal(model(data()), plain(data()))
    engine = make(3, model)
    assert all(shard_of(parameter) is None for parameter in model.parameters())
    other = make(3, plain)
    assert train(engine, 3) == train(other, 3)


@on_ranks(2)
def test_init_takes_a_module_and_cleans_up() -> None:
    before = nn.Module.apply
    model = Model()
    model.head.requires_grad_(False)
    deepspeed.zero.Init(module=model, dtype=torch.bfloat16)
    assert model.head.weight.dtype is torch.bfloat16 and not model.head.weight.requires_grad
    with pytest.raises(ValueError, match="stop"), deepspeed.zero.Init():
        nn.Linear(2, 2)
        raise ValueError("stop")
    assert nn.Module.apply is before
    assert shard_of(nn.Sequential(nn.Linear(2, 2))[0].weight) is None
    with deepspeed.zero.Init(enabled=False):
        assert shard_of(nn.Sequential(nn.Linear(2, 2))[0].weight) is None
    with pytest.raises(UnsupportedError, match=r"zero.Init\(mpu\)"):
        deepspeed.zero.Init(mpu=object(), enabled=False)


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_one_ranks_values_become_everybodys_and_the_masters(stage: int) -> None:
    rank = deepspeed.comm.get_rank()
    engine = make(stage, bf16={"enabled": True})
    weight, bias = engine.module.head.weight, engine.module.head.bias
    train(engine, 1)
    with deepspeed.zero.GatheredParameters([bias, weight], modifier_rank=1):
        if rank == 1:
            bias.data.fill_(0.25)
            weight.data[0, 0] = 3.0
    assert deepspeed.utils.safe_get_full_fp32_param(bias).tolist() == [0.25] * WIDTH
    assert deepspeed.utils.safe_get_full_fp32_param(weight)[0, 0] == 3.0
    with deepspeed.zero.GatheredParameters(weight):
        assert weight[0, 0] == 3.0 and weight.dtype is torch.bfloat16
    with pytest.raises(ModelError, match="modifier_rank"), deepspeed.zero.GatheredParameters(bias):
        if rank == 0:  # the error is everybody's
            bias.data.add_(1)
    assert all(loss == loss for loss in train(engine, 2, first=1))


@on_ranks(2)
def test_parameters_without_an_engine() -> None:
    with deepspeed.zero.Init():
        linear = nn.Linear(4, 4)
    assert linear.to("cpu").weight is linear.weight
    with pytest.raises(ModelError, match="modifier_rank"), deepspeed.zero.GatheredParameters(linear.weight):
        linear.weight.data.copy_(linear.weight.data.flip(0))
    for enabled in (True, False):
        with deepspeed.zero.GatheredParameters(linear.weight, modifier_rank=0, enabled=enabled):
            assert isinstance(linear.weight, AbsentParameter) is not enabled
    linear.weight.data = torch.zeros(4, 4)  # torch lets this pass
    with pytest.raises(ModelError, match="while it is sharded"):
        deepspeed.zero.GatheredParameters(linear.weight).__enter__()
    linear = nn.Linear(4, 4)
    with deepspeed.zero.GatheredParameters(linear.weight, modifier_rank=0):
        linear.weight.data.fill_(deepspeed.comm.get_rank())
    assert linear.weight[0, 0] == deepspeed.comm.get_rank()  # whole already: nobody's business


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_full_and_local_states_agree(stage: int) -> None:
    engine = make(stage, gradient_accumulation_steps=2, bf16={"enabled": True})
    weight = engine.module.blocks[1].up.weight
    utils = deepspeed.utils
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
    for step in range(2):
        engine.backward(square(engine(data(step))))
        gradient = utils.safe_get_full_grad(weight)
        if step == 0:
            engine.step()
    local = utils.safe_get_local_grad(weight)
    utils.safe_set_local_grad(weight, local * 2)
    doubled = utils.safe_get_full_grad(weight)
    assert torch.equal(doubled, 2 * gradient)
    utils.safe_update_full_grad_vectorized([weight], lambda grad, parameter: grad / 2)
    assert torch.equal(utils.safe_get_full_grad(weight), gradient)
    engine.step()
    master = utils.safe_get_full_fp32_param(weight)
    mine = utils.safe_get_local_fp32_param(weight)
    utils.safe_set_local_fp32_param(weight, mine + 1)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), master + 1)
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight.float(), (master + 1).bfloat16().float())
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    part = utils.safe_get_local_optimizer_state(weight, "exp_avg")
    utils.safe_set_local_optimizer_state(weight, part * 0 + 7, "exp_avg")
    assert (utils.safe_get_full_optimizer_state(weight, "exp_avg") == 7).all()
    utils.safe_set_full_optimizer_state(weight, moment, "exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), moment)
    with pytest.raises(ModelError, match="as many values"):
        utils.safe_set_local_fp32_param(weight, torch.zeros(mine.numel() + 1))
    counts: list[Any] = [None, None]
    torch.distributed.all_gather_object(counts, mine.numel())
    assert sum(counts) == 2 * WIDTH * WIDTH
    assert utils.safe_get_full_grad(nn.Parameter(torch.zeros(1))) is None


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_frozen_parameter_has_no_master_gradient_or_state(stage: int) -> None:
    net = Seeded()
    net.into.requires_grad_(False)
    engine, utils = make(stage, net), deepspeed.utils

    def read(parameter: nn.Parameter) -> list[bool]:
        values = [getattr(utils, f"safe_get_{of}_fp32_param")(parameter) for of in ("full", "local")]
        values += [getattr(utils, f"safe_get_{of}_grad")(parameter) for of in ("full", "local")]
        for name in ("exp_avg", "exp_avg_sq"):
            state = [getattr(utils, f"safe_get_{of}_optimizer_state") for of in ("full", "local")]
            values += [get(parameter, name) for get in state]
        return [value is not None for value in values]

    train(engine, 1)
    engine.backward(square(engine(data(1))))
    assert read(engine.module.into.weight) == [False] * 8
    assert read(engine.module.head.weight) == [True] * 8


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_masters_take_what_is_loaded(stage: int) -> None:
    """Masters keep a value that is loaded in fp32 as it is; a value that is not loaded keeps every bit, also
    where one was loaded inside `GatheredParameters` before."""
    torch.manual_seed(1)
    engine = make(stage, bf16={"enabled": True})
    values = {name: torch.randn_like(value) for name, value in Seeded().state_dict().items()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.load_state_dict(values)
    train(engine, 1)
    kept = deepspeed.utils.safe_get_full_fp32_param(engine.module.head.weight)
    other = {name: torch.randn_like(value) for name, value in values.items() if name != "head.weight"}
    engine.module.load_state_dict(other, strict=False)
    for name, parameter in engine.module.named_parameters():
        expected = kept if name == "head.weight" else other[name]
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(parameter), expected), name
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        assert torch.equal(engine.module.into.weight.float(), other["into.weight"].bfloat16().float())


@pytest.mark.parametrize("made", [False, True])
@on_ranks(2)
def test_what_is_held_in_pieces_cannot_be_written_or_become_anothers(made: bool) -> None:
    """`param.data` has the parameter's shape, dtype and device; `param.ds_tensor` is read-only."""
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        net = Seeded()
    engine = make(3, net) if made else None
    weight, other = net.head.weight, net.into.weight
    told, held = weight.data, weight.ds_tensor
    assert (told.shape, told.dtype, told.device) == (weight.shape, torch.float32, torch.device("cpu"))
    weight.data = weight.data.to("cpu")
    for takes in (torch.zeros(WIDTH, WIDTH), torch.nn.Parameter(torch.zeros(2))):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            takes.data = weight.data
        with pytest.raises((RuntimeError, ModelError)):
            takes.detach().set_(weight.data)
    for wrong in (
        lambda: setattr(weight, "data", other.data),
        lambda: torch.distributed.all_reduce(weight.data),
        lambda: torch.zeros(WIDTH, WIDTH).mul_(0.9).add_(weight.data, alpha=0.1),
        lambda: weight.data.fill_(1.0),
        lambda: weight.data.sum().item(),
    ):
        with pytest.raises(ModelError, match="must be gathered"):
            wrong()
    before = held.clone()
    assert type(before) is torch.Tensor and held.ds_numel == before.numel()
    for write in (
        lambda: held.data[:1].fill_(1.0),
        lambda: held.__setitem__(0, 1.0),
        lambda: torch.add(before, 1.0, out=held.detach()),
        lambda: setattr(held, "data", before),
        lambda: torch._foreach_add_([held], 1.0),
        lambda: torch.distributed.all_reduce(held),
    ):
        with pytest.raises(UnsupportedError, match=r"`param.ds_tensor`.*`modifier_rank`"):
            write()
    for name in ("all_gather", "partition"):
        with pytest.raises(UnsupportedError, match=rf"`param.{name}`.*GatheredParameters"):
            getattr(weight, name)()
    with pytest.raises(UnsupportedError, match=r"engine.backward"):
        weight.reduce_gradients_at_owner()
    assert torch.equal(weight.ds_tensor, before)
    assert train(engine or make(3, net), 1) == train(make(3, Seeded()), 1)
    assert not before.numel() or not torch.equal(weight.ds_tensor, before), "it is what the engine holds now"


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_gradients_are_there_at_stage_0_and_named_elsewhere(stage: int) -> None:
    engine = make(stage, bf16={"enabled": True})
    engine.backward(square(engine(data())))
    parameters = list(engine.module.parameters())
    if stage:
        with pytest.raises(ModelError, match=r"`into.weight`: its gradient must be read from the engine"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    else:
        before = deepspeed.utils.safe_get_full_grad(parameters[0])
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        after = deepspeed.utils.safe_get_full_grad(parameters[0])
        torch.testing.assert_close(after, before * (1e-3 / (norm + 1e-6)))
        assert parameters[0].grad.dtype is torch.float32
        deepspeed.utils.safe_set_full_grad(parameters[0], before)
        torch.testing.assert_close(parameters[0].grad, before)
    engine.step()
    assert parameters[0].grad is None
