"""The drop-in on ranks: models in pieces, full and local values, writes of one rank, boundaries, files."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerodrift.deepspeed as deepspeed
from tests.ranks.harness import run_ranks
from zerodrift.deepspeed.parameters.contexts import LENT
from zerodrift.deepspeed.parameters.shards import shard_of
from zerodrift.deepspeed.runtime.torch_autocast import get_comm_dtype, has_comm_dtype
from zerodrift.engine.habits.absent_parameter import AbsentParameter
from zerodrift.errors import CheckpointError, ModelError, UnsupportedError

ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        nn.init.constant_(self.linear.bias, 0.5)  # of a child, in a parent's own __init__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 3)
        self.register_buffer("third", torch.tensor(1 / 3))
        self.apply(self._set)

    def _set(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.third


def config(stage: int, **rest: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "zero_optimization": {"stage": stage}}
    return {**base, **rest}


def make(stage: int = 3, model: nn.Module | None = None, **rest: Any) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(model=model or Model(), config=config(stage, **rest))[0]


def batch(step: int) -> torch.Tensor:
    rank = deepspeed.comm.get_rank()
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = engine(batch(step)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# --- zero.Init --------------------------------------------------------------------------------------------


def in_pieces() -> None:
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
        model(batch(0))
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert torch.equal(model(batch(0)), plain(batch(0)))
    engine = make(3, model)
    assert all(shard_of(parameter) is None for parameter in model.parameters())
    other = make(3, plain)
    assert train(engine, 3) == train(other, 3)


def test_a_model_in_pieces_trains_as_one_that_was_whole() -> None:
    run_ranks(in_pieces, 2)


def bytes_of(state: Any) -> bytes:
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


class LoopsOfItsOwn(nn.Module):
    """A model that initialises its parts in the usual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24) for _ in range(2))
        self.tied = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
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


def loops_of_its_own() -> None:
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


def test_an_init_may_initialise_what_is_below_it() -> None:
    run_ranks(loops_of_its_own, 2)


def apply_outside() -> None:
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


def test_init_takes_a_module_and_cleans_up() -> None:
    run_ranks(apply_outside, 2)


def test_init_refuses_what_is_not_here() -> None:
    with pytest.raises(UnsupportedError, match=r"zero.Init\(mpu\)"):
        deepspeed.zero.Init(mpu=object(), enabled=False)
    with pytest.raises(UnsupportedError, match="2 problems"):
        deepspeed.zero.Init(remote_device="nvme", zero_quantized_weights=True, enabled=False)


# --- GatheredParameters -----------------------------------------------------------------------------------


def writing(stage: int) -> list[float]:
    rank = deepspeed.comm.get_rank()
    engine = make(stage, bf16={"enabled": True})
    weight, bias = engine.module.head.weight, engine.module.head.bias
    train(engine, 1)
    with deepspeed.zero.GatheredParameters([bias, weight], modifier_rank=1):
        if rank == 1:
            bias.data.fill_(0.25)
            weight.data[0, 0] = 3.0
    assert deepspeed.utils.safe_get_full_fp32_param(bias).tolist() == [0.25] * 3
    assert deepspeed.utils.safe_get_full_fp32_param(weight)[0, 0] == 3.0
    with deepspeed.zero.GatheredParameters(weight):
        assert weight[0, 0] == 3.0 and weight.dtype is torch.bfloat16
    with pytest.raises(ModelError, match="modifier_rank"), deepspeed.zero.GatheredParameters(bias):
        if rank == 0:  # the error is everybody's
            bias.data.add_(1)
    losses = train(engine, 2, first=1)
    engine.destroy()
    return losses


def test_one_ranks_values_become_everybodys_and_the_masters() -> None:
    for stage in (0, 2):
        for losses in run_ranks(writing, 2, stage):
            assert all(loss == loss for loss in losses)


def test_it_holds_where_parameters_are_sharded() -> None:
    run_ranks(writing, 2, 3)


def outside() -> None:
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


def test_parameters_without_an_engine() -> None:
    run_ranks(outside, 2)


# --- states -----------------------------------------------------------------------------------------------


def states(stage: int) -> dict[str, Any]:
    engine = make(stage, gradient_accumulation_steps=2, bf16={"enabled": True})
    weight = engine.module.blocks[1].linear.weight
    utils = deepspeed.utils
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
    for step in range(2):
        engine.backward(engine(batch(step)).float().square().mean())
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
    found = {"gradient": gradient, "master": master, "moment": moment, "count": mine.numel()}
    assert utils.safe_get_full_grad(nn.Parameter(torch.zeros(1))) is None
    engine.destroy()
    return found


def test_full_and_local_states_agree_at_every_stage() -> None:
    runs = {stage: run_ranks(states, 2, stage) for stage in (1, 2, 3)}
    for stage, ranks in runs.items():
        assert sum(rank["count"] for rank in ranks) == 256, stage
        for key in ("gradient", "master", "moment"):
            assert torch.equal(ranks[0][key], ranks[1][key])
    # Stages 2 and 3 reduce every micro-batch, 1 reduces their sum.
    assert torch.equal(runs[2][0]["gradient"], runs[3][0]["gradient"])
    torch.testing.assert_close(runs[1][0]["gradient"], runs[3][0]["gradient"], rtol=2e-2, atol=1e-6)


# --- boundaries -------------------------------------------------------------------------------------------


def by_hand(stage: int) -> dict[str, Any]:
    """Train four micro-batches: counted, declared, divided by the caller, and two backwards to a step."""
    runs: dict[str, Any] = {}
    for how in ("counted", "told", "divided"):
        engine = make(stage, gradient_accumulation_steps=4, gradient_clipping=0.0)
        for step in range(4):
            if how == "told":
                engine.set_gradient_accumulation_boundary(step == 3)
            loss = engine(batch(step)).square().mean()
            if how == "divided":
                engine.backward(loss / 4, scale_wrt_gas=False)
            else:
                returned = engine.backward(loss)
                assert torch.equal(returned, loss.detach() / 4) and not returned.requires_grad
            assert engine.is_gradient_accumulation_boundary() is (step == 3)
            if how != "told" or step == 3:
                engine.step()
                assert engine.was_step_applied() is (step == 3)
        runs[how] = (engine.get_global_grad_norm(), engine.module_state_dict()["head.weight"])
        assert engine.global_steps == 1 and engine.global_samples == 16
        engine.destroy()
    return runs


def test_however_the_boundary_is_set_the_step_is_the_same() -> None:
    for stage in (1, 3):
        for runs in run_ranks(by_hand, 2, stage):
            for how in ("told", "divided"):
                assert runs[how][0] == runs["counted"][0]
                assert torch.equal(runs[how][1], runs["counted"][1])


def waiting() -> None:
    engine = make(1, gradient_accumulation_steps=2)
    with engine.no_sync():
        engine.backward(engine(batch(0)).square().mean())
        with pytest.raises(UnsupportedError, match="outside"):
            engine.step()
        with pytest.raises(UnsupportedError, match="inside itself"), engine.no_sync():
            pass
    engine.micro_steps += 1
    engine.update_boundary()
    engine.backward(engine(batch(1)).square().mean())
    engine.step()
    assert engine.was_step_applied()
    weights = engine.module_state_dict()
    engine.destroy()
    other = make(1, gradient_accumulation_steps=2)
    train(other, 2)
    assert all(torch.equal(weights[name], value) for name, value in other.module_state_dict().items())
    other.destroy()


def test_no_sync_changes_when_and_not_what() -> None:
    run_ranks(waiting, 2)


# --- dtypes, files ----------------------------------------------------------------------------------------


def wires() -> None:
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


def test_a_parameters_communication_dtype_is_the_plans() -> None:
    run_ranks(wires, 2)


def tags_that_differ(folder: str, mode: str) -> None:
    engine = make(1, checkpoint={"tag_validation": mode})
    tag = f"tag{deepspeed.comm.get_rank()}"
    if mode == "FAIL":
        with pytest.raises(AssertionError, match="the same on all ranks; got 'tag0', 'tag1'"):
            engine.save_checkpoint(folder, tag=tag)
    else:
        engine.save_checkpoint(folder, tag=tag)
        assert engine.load_checkpoint(folder)[0] == str(Path(folder) / "tag0")


@pytest.mark.parametrize("mode", ["FAIL", "Warn"])
def test_tags_that_differ_between_ranks(mode: str, tmp_path: Path) -> None:
    run_ranks(tags_that_differ, 2, str(tmp_path), mode)


def saved(folder: str, stage: int, other: int) -> None:
    engine = make(stage, bf16={"enabled": True})
    train(engine, 2)
    rank = deepspeed.comm.get_rank()
    engine.save_checkpoint(folder, client_state={"rank": rank})
    goes_on = train(engine, 2, first=2)
    engine.destroy()
    engine = make(other, bf16={"enabled": True})
    path, client = engine.load_checkpoint(folder)
    assert client == {"rank": 0} and path == str(Path(folder) / "global_step2")
    assert train(engine, 2, first=2) == goes_on
    counts = (engine.global_steps, engine.micro_steps, engine.global_samples)
    assert counts == (4, 4, 16)
    engine.destroy()
    engine = make(other, bf16={"enabled": True})
    weights = engine.load_checkpoint(folder, tag="global_step2", load_optimizer_states=False)
    assert weights[1] == {"rank": 0} and engine.global_steps == 2
    head = engine.module.head.weight
    assert deepspeed.utils.safe_get_full_optimizer_state(head, "exp_avg") is None
    engine.destroy()
    engine = make(other, bf16={"enabled": True})
    engine.load_checkpoint(folder, load_module_only=True)
    assert engine.global_steps == 0
    with pytest.raises(CheckpointError, match="'global_step9'"):
        engine.load_checkpoint(folder, tag="global_step9")
    with pytest.raises(UnsupportedError, match="custom_load_fn"):
        engine.load_checkpoint(folder, custom_load_fn=print)
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    assert (consolidated is None) is (rank == 1)
    if rank == 0:
        masters = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        assert masters.keys() == consolidated.keys() == engine.module.state_dict().keys()
        for name, value in consolidated.items():
            assert torch.equal(masters[name].to(value.dtype), value), name
    engine.destroy()


def test_checkpoints_load_at_another_stage_and_in_part() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(saved, 2, folder, 3, 1)


def taken_between_uses() -> None:
    """Use a state dict on a rank that saves nothing as the saving rank does; no number comes of it."""
    from safetensors.torch import save_file, save_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    tied = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    engine = make(3, LlamaForCausalLM(tied))
    module, name = engine.module, "model.norm.weight"
    entries = module.state_dict()
    assert {n: (v.shape, v.dtype) for n, v in entries.items()} == {
        n: (v.shape, v.dtype) for n, v in LlamaForCausalLM(tied).state_dict().items()
    }
    value = entries[name]
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(module, "should_save_on_this_rank"):  # older versions of transformers write on every rank
            module.save_pretrained(folder, is_main_process=False)
        assert not list(Path(folder).iterdir())
        assert value.cpu().clone().half().view(2, 8)[1].shape == (8,) and copy.deepcopy(entries).keys()
        assert torch.stack([value, torch.zeros(16)]).dtype == torch.float32
        file, there, plain = Path(folder) / "file", torch.zeros(16), nn.Parameter(torch.zeros(16))
        asked = {
            "item": lambda: value.sum().item(),
            "tolist": value.tolist,
            "__bool__": lambda: bool(value[0] == value[0]),
            "mul_": lambda: value.mul_(2),
            "copy_": lambda: there.copy_(value),
            "__setitem__": lambda: there.__setitem__(0, value[0]),
            "pickle": lambda: torch.save(entries, file),
            "is_contiguous": lambda: save_file({name: value}, file),
            "clone": lambda: module.get_parameter(name).clone(),
        }
        for what, ask in asked.items():
            with pytest.raises(ModelError, match=rf"`{name}`.*got `{what}`|`pickle` of") as error:
                ask()
            assert "zero.GatheredParameters" in str(error.value)
        with pytest.raises(ModelError, match="must be gathered"):
            save_model(module, str(file))
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            plain.data = value
        assert not plain.any() and not there.any()
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        assert module.state_dict()[name].eq(1).all()
    engine.destroy()


def test_what_a_state_dict_takes_between_uses_has_no_values() -> None:
    run_ranks(taken_between_uses, 2)
