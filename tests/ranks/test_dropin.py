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
from zerodrift.deepspeed.parameters.contexts import LENT
from zerodrift.deepspeed.parameters.shards import shard_of
from zerodrift.deepspeed.runtime.torch_autocast import get_comm_dtype, has_comm_dtype
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


# --- zero.Init --------------------------------------------------------------------------------------------


class Filled(nn.Module):
    """A block that initialises its child in its own `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.linear.bias, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Model(Seeded):
    """A model with a buffer, which initialises everything once more by `apply`."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.into, self.head = nn.Identity(), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Filled() for _ in range(2))
        self.register_buffer("third", torch.tensor(1 / 3))
        self.apply(self._set)

    def _set(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)


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
        assert piece is not None and piece.flat.numel() == -(-parameter.numel() // 2)
        assert parameter.shape == parameter.ds_shape
        assert parameter.untyped_storage().nbytes() <= 8
    assert model.third.item() == plain.third.item()
    for ask in (model.head.weight.data.zero_, model.head.weight.sum, lambda: bytes_of(model.state_dict())):
        with pytest.raises(ModelError, match=r"`(Linear|Model)\.\w+`: must be gathered when its values are"):
            ask()
    with deepspeed.zero.GatheredParameters(model.parameters()):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)  # rank 0's, bit for bit
    with pytest.raises(ModelError, match=r"forward of \w+`: must come after `deepspeed.initialize`"):
        model(data())
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert torch.equal(model(data()), plain(data()))
    engine = make(3, model)
    assert all(shard_of(parameter) is None for parameter in model.parameters())
    other = make(3, plain)
    assert train(engine, 3) == train(other, 3)


def bytes_of(state: Any) -> bytes:
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


class LoopsOfItsOwn(nn.Module):
    """A model that initialises its parts in the usual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 24) for _ in range(2))
        self.tied = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bias.data.uniform_(-1, 1)
                nn.init.orthogonal_(module.weight)
        with torch.no_grad():
            self.tied[0].weight.copy_(self.tied[1].weight)
            self.layers[0].linear1.weight[0] = 3.0
            self.layers[1].linear1.weight.mul_(0.5)
        self.layers[1].self_attn.bfloat16()


@on_ranks(2)
def test_an_init_may_initialise_what_is_below_it() -> None:
    torch.manual_seed(0)
    plain = LoopsOfItsOwn()
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        model = LoopsOfItsOwn()
        assert sum(shard_of(p).lent is not None for p in model.parameters()) <= LENT  # type: ignore[union-attr]
    assert all(p.untyped_storage().nbytes() <= 8 for p in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs), name
    make(3, model).destroy()


@on_ranks(2)
def test_init_takes_a_module_and_cleans_up() -> None:
    """Apply `zero.Init` to a module with a frozen part, and check that an exception leaves no patch."""
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


def test_init_refuses_what_is_not_here() -> None:
    with pytest.raises(UnsupportedError, match=r"zero.Init\(mpu\)"):
        deepspeed.zero.Init(mpu=object(), enabled=False)
    with pytest.raises(UnsupportedError, match="2 problems"):
        deepspeed.zero.Init(remote_device="nvme", zero_quantized_weights=True, enabled=False)


# --- GatheredParameters -----------------------------------------------------------------------------------


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
    linear.weight.data = torch.zeros(4, 4)  # torch lets this pass
    with pytest.raises(ModelError, match="while it is in pieces"):
        deepspeed.zero.GatheredParameters(linear.weight).__enter__()
    linear = nn.Linear(4, 4)
    with deepspeed.zero.GatheredParameters(linear.weight, modifier_rank=0):
        linear.weight.data.fill_(deepspeed.comm.get_rank())
    assert linear.weight[0, 0] == deepspeed.comm.get_rank()  # whole already: nobody's business
    with deepspeed.zero.Init():
        linear = nn.Linear(4, 4)
    gathered = deepspeed.zero.GatheredParameters(linear.weight)
    with pytest.raises(ModelError, match="modifier_rank"), gathered:
        linear.weight.data.zero_()
    gathered = deepspeed.zero.GatheredParameters(linear.weight, modifier_rank=0)
    with pytest.raises(ValueError, match="stop"), gathered:
        raise ValueError("stop")
    for enabled in (True, False):
        with deepspeed.zero.GatheredParameters(linear.weight, modifier_rank=0, enabled=enabled):
            assert isinstance(linear.weight, AbsentParameter) is not enabled


# --- states -----------------------------------------------------------------------------------------------


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


# --- boundaries -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_no_sync_changes_when_and_not_what() -> None:
    engine = make(1, gradient_accumulation_steps=2)
    with engine.no_sync():
        engine.backward(square(engine(data(0))))
        with pytest.raises(UnsupportedError, match="outside"):
            engine.step()
        with pytest.raises(UnsupportedError, match="inside itself"), engine.no_sync():
            pass
    engine.micro_steps += 1
    engine.update_boundary()
    engine.backward(square(engine(data(1))))
    engine.step()
    assert engine.was_step_applied()
    weights = engine.module_state_dict()
    engine.destroy()
    other = make(1, gradient_accumulation_steps=2)
    train(other, 2)
    assert all(torch.equal(weights[name], value) for name, value in other.module_state_dict().items())
    other.destroy()


@on_ranks(2)
def test_a_parameters_communication_dtype_is_the_plans() -> None:
    engine = make(2, torch_autocast={"enabled": True, "dtype": "bfloat16"}, communication_data_type="fp32")
    assert {get_comm_dtype(p) for p in engine.module.parameters()} == {torch.float32}
    assert not any(has_comm_dtype(p) for p in engine.module.parameters())
    assert engine.communication_data_type is torch.float32
    engine.destroy()
    engine = make(2, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert get_comm_dtype(engine.module.head.weight) is torch.bfloat16
    assert has_comm_dtype(engine.module.head.weight)
    assert engine.torch_autocast_enabled() and not engine.bfloat16_enabled()
    engine.destroy()
    assert not has_comm_dtype(engine.module.head.weight)


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_masters_take_what_is_loaded(stage: int) -> None:
    """Masters keep a value that is loaded in fp32 as it is; a value that is not loaded keeps every bit."""
    torch.manual_seed(1)
    engine = make(stage, bf16={"enabled": True})
    train(engine, 1)
    kept = deepspeed.utils.safe_get_full_fp32_param(engine.module.head.weight)
    other = {k: torch.randn_like(v) for k, v in Seeded().state_dict().items() if k != "head.weight"}
    engine.module.load_state_dict(other, strict=False)
    for name, parameter in engine.module.named_parameters():
        expected = kept if name == "head.weight" else other[name]
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(parameter), expected), name
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        assert torch.equal(engine.module.into.weight.float(), other["into.weight"].bfloat16().float())
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_load_in_a_context_ends_with_it(stage: int) -> None:
    """Weights that were loaded inside `GatheredParameters` do not come back with a later load."""
    engine = make(stage, bf16={"enabled": True})
    values = {name: torch.randn_like(value) for name, value in Seeded().state_dict().items()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.load_state_dict(values)
    train(engine, 1)
    kept = deepspeed.utils.safe_get_full_fp32_param(engine.module.into.weight)
    engine.module.load_state_dict({"head.weight": values["head.weight"]}, strict=False)
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(engine.module.into.weight), kept)
    assert torch.equal(
        deepspeed.utils.safe_get_full_fp32_param(engine.module.head.weight), values["head.weight"]
    )
    engine.destroy()


@pytest.mark.parametrize("stage", [3])
@on_ranks(2)
def test_a_model_in_slices_says_so(stage: int) -> None:
    """A destroyed engine leaves a model in slices, which can be gathered, changed, and used again."""
    net = Seeded()
    engine = make(stage, net, bf16={"enabled": True})
    train(engine, 1)
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    engine.destroy()
    engine.destroy()
    with pytest.raises(
        ModelError, match=r"`into.weight`: must be gathered.*zero.GatheredParameters.*initialize"
    ):
        net(data().bfloat16())
    with pytest.raises(ModelError, match="must be gathered"):
        net.head.weight.sum()
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        assert all(torch.equal(p, weights[name]) for name, p in net.named_parameters())
        assert net(data().bfloat16()).isfinite().all()
    with pytest.raises(ModelError, match="must be gathered"):
        net.head.weight.sum()
    like = Seeded().bfloat16()
    like.load_state_dict(weights)
    engines = [make(3, each, bf16={"enabled": True}) for each in (net, like)]
    assert train(engines[0], 1) == train(engines[1], 1)
    for each in engines:
        each.destroy()


@pytest.mark.parametrize("made", [False, True])
@on_ranks(2)
def test_data_in_pieces_is_nobody_elses(made: bool) -> None:
    """`param.data` in pieces has its shape, dtype and device, and cannot become another's."""
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        net = Seeded()
    engine = make(3, net) if made else None
    parameter, other = net.head.weight, net.into.weight
    told = parameter.data
    assert (told.shape, told.dtype, told.device) == (parameter.shape, torch.float32, torch.device("cpu"))
    assert told.numel() == parameter.numel() and not told.is_cuda and not told.is_meta
    parameter.data = parameter.data
    parameter.data = parameter.data.to("cpu")
    for takes in (torch.zeros(WIDTH, WIDTH), torch.nn.Parameter(torch.zeros(2))):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            takes.data = parameter.data
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            takes.data = parameter.detach()
        with pytest.raises((RuntimeError, ModelError)):
            takes.detach().set_(parameter.data)
    for wrong in (
        lambda: setattr(parameter, "data", other.data),
        lambda: torch.distributed.all_reduce(parameter.data),
        lambda: torch.zeros(WIDTH, WIDTH).mul_(0.9).add_(parameter.data, alpha=0.1),
        lambda: parameter.data.fill_(1.0),
        lambda: parameter.data.sum().item(),
    ):
        with pytest.raises(ModelError, match="must be gathered"):
            wrong()
    engine = engine or make(3, net)
    assert train(engine, 1) == train(make(3, Seeded()), 1)
    engine.destroy()


@pytest.mark.parametrize("made", [False, True])
@on_ranks(2)
def test_what_is_held_is_read_only(made: bool) -> None:
    """`param.ds_tensor` is read-only, and methods that would move values name an alternative."""
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        net = Seeded()
    engine = make(3, net) if made else None
    weight = net.head.weight
    held = weight.ds_tensor
    before = held.clone()
    assert (
        type(before) is torch.Tensor and held.ds_numel == held.numel() and torch.equal(held.float(), before)
    )
    torch.zeros_like(before).copy_(held).add_(1.0)
    for write in (
        lambda: held.add_(1.0),
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
    engine = engine or make(3, net)
    train(engine, 1)
    assert (not before.numel()) or not torch.equal(
        weight.ds_tensor, before
    )  # it is what the engine holds now
    engine.destroy()


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
    engine.destroy()
