"""Files of the drop-in: tags, checkpoints that are loaded in part and at another stage, state dicts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerodrift.deepspeed as deepspeed
from tests.habits.networks import WIDTH, Seeded
from tests.ranks.harness import on_ranks, run_ranks
from tests.ranks.test_dropin import make, train
from zerodrift.errors import CheckpointError, ModelError, UnsupportedError


@pytest.mark.parametrize("mode", ["FAIL", "Warn"])
@on_ranks(2)
def test_tags_that_differ_between_ranks(tmp_path: Path, mode: str) -> None:
    folder = str(tmp_path)
    engine = make(1, checkpoint={"tag_validation": mode})
    tag = f"tag{deepspeed.comm.get_rank()}"
    if mode == "FAIL":
        with pytest.raises(AssertionError, match="the same on all ranks; got 'tag0', 'tag1'"):
            engine.save_checkpoint(folder, tag=tag)
    else:
        engine.save_checkpoint(folder, tag=tag)
        assert engine.load_checkpoint(folder)[0] == str(Path(folder) / "tag0")


def saved(folder: str) -> None:
    engine = make(3, bf16={"enabled": True})
    train(engine, 2)
    rank = deepspeed.comm.get_rank()
    engine.save_checkpoint(folder, client_state={"rank": rank})
    goes_on = train(engine, 2, first=2)
    engine.destroy()
    engine = make(1, bf16={"enabled": True})
    path, client = engine.load_checkpoint(folder)
    assert client == {"rank": 0} and path == str(Path(folder) / "global_step2")
    assert train(engine, 2, first=2) == goes_on
    counts = (engine.global_steps, engine.micro_steps, engine.global_samples)
    assert counts == (4, 4, 32)
    engine.destroy()
    engine = make(1, bf16={"enabled": True})
    weights = engine.load_checkpoint(folder, tag="global_step2", load_optimizer_states=False)
    assert weights[1] == {"rank": 0} and engine.global_steps == 2
    head = engine.module.head.weight
    assert deepspeed.utils.safe_get_full_optimizer_state(head, "exp_avg") is None
    engine.destroy()
    engine = make(1, bf16={"enabled": True})
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


def test_checkpoints_load_at_another_stage_and_in_part(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path))


def frozen_in_part(stage: int, seed: float | None = None) -> Any:
    """Make an engine with a frozen block, whose values begin with a number if there is one."""
    net = Seeded()
    net.blocks[0].requires_grad_(False)
    for parameter in net.parameters() if seed is not None else ():
        nn.init.constant_(parameter, seed)
    return make(stage, net, bf16={"enabled": True})


def without_frozen(root: str) -> None:
    engine = frozen_in_part(3)
    frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
    train(engine, 1)
    engine.save_checkpoint(root, "lean", exclude_frozen_parameters=True)
    engine.save_checkpoint(root, "whole", save_latest=False)
    expected = train(engine, 2, first=1)
    masters = {name: engine.running.parameter(name).master for name in frozen}
    with pytest.raises(CheckpointError, match=r"must hold every parameter of the model.*blocks.0.up.weight"):
        engine.load_checkpoint(root, "lean")
    path, _ = engine.load_checkpoint(root, "lean", load_module_strict=False)
    assert path == str(Path(root) / "lean") and train(engine, 2, first=1) == expected
    engine.load_checkpoint(root, "whole")
    assert train(engine, 2, first=1) == expected

    other = frozen_in_part(2, 0.5)
    other.load_checkpoint(root, "lean", load_module_strict=False)
    for name in frozen:
        assert (other.running.parameter(name).master == 0.5).all(), "left as it was"
    with other.running.gathered(write=True) as values:
        for name in frozen:
            values[name].copy_(masters[name])
    assert train(other, 2, first=1) == pytest.approx(expected, abs=2e-2)


def test_frozen_parameters_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    run_ranks(without_frozen, 2, str(tmp_path))
    lean, whole = (
        sum(path.stat().st_size for path in (tmp_path / tag).glob("*.distcp")) for tag in ("lean", "whole")
    )
    assert whole - lean > 4 * WIDTH * WIDTH * 2


class Headed(nn.Module):
    def __init__(self, name: str, width: int = 1) -> None:
        super().__init__()
        torch.manual_seed(len(name))
        self.body = nn.Linear(WIDTH, WIDTH)
        self.add_module(name, nn.Linear(WIDTH, width))
        self.register_buffer(f"of_{name}", torch.ones(2))
        self._head = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self._head)(self.body(x))


@on_ranks(2)
def test_a_model_with_another_head(tmp_path: Path) -> None:
    root = str(tmp_path)
    engine = make(2, Headed("old"))
    train(engine, 1)
    engine.save_checkpoint(root)
    trained = engine.running.parameter("body.weight")
    body, moments = trained.master, dict(trained.state)
    engine.destroy()

    engine = make(2, Headed("fresh"))
    fresh = engine.running.parameter("fresh.weight").master
    with pytest.raises(CheckpointError, match=r"`fresh.weight`"):
        engine.load_checkpoint(root)
    assert not torch.equal(engine.running.parameter("body.weight").master, body)
    engine.load_checkpoint(root, load_module_strict=False)
    loaded, own = (engine.running.parameter(name) for name in ("body.weight", "fresh.weight"))
    assert torch.equal(loaded.master, body) and torch.equal(loaded.state["exp_avg"], moments["exp_avg"])
    assert torch.equal(own.master, fresh) and not own.state["exp_avg"].any()
    train(engine, 1)
    assert not torch.equal(engine.running.parameter("fresh.weight").master, fresh)
    engine.destroy()

    engine = make(2, Headed("old", width=3))
    with pytest.raises(CheckpointError, match=r"`old.weight`: must have shape \[3, 8\]"):
        engine.load_checkpoint(root, load_module_strict=False)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_memory_that_is_assigned_is_named_where_values_are_saved(stage: int) -> None:
    """A trained parameter's, whose former memory a script keeps; a frozen one's is taken over."""
    net = Seeded()
    net.blocks[0].requires_grad_(False)
    engine = make(stage, net)
    net.blocks[0].down.bias.data = torch.full((WIDTH,), 0.5)
    assert torch.equal(engine.module_state_dict()["blocks.0.down.bias"], torch.full((WIDTH,), 0.5))
    held = net.head.weight.data
    net.head.weight.data = torch.zeros_like(held)
    with pytest.raises(ModelError, match=r"`head.weight`: must have the memory.*Assign the former `.data`"):
        engine.module_state_dict()
    net.head.weight.data = held
    assert torch.equal(engine.module_state_dict()["head.weight"], held)
    engine.destroy()


class Renames(Seeded):
    """A model whose `state_dict` renames keys and leaves one out, as TRL's with a value head."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {
            name.replace("blocks.", "layers."): value for name, value in state.items() if "into" not in name
        }


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_state_dict_of_the_models_own(stage: int) -> None:
    """A `state_dict` is whole and has the model's keys; files of stage 3 have the names of modules, as
    with DeepSpeed."""
    net = Renames()
    net.head.requires_grad_(False)
    engine = make(stage, net)
    train(engine, 1)
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        whole = {name: p.detach().clone() for name, p in net.named_parameters()}
        own = {name: value.clone() for name, value in net.state_dict().items()}
    assert own.keys() != whole.keys()
    for frozen in (False, True):
        expected = [
            {name: value for name, value in state.items() if not (frozen and "head" in name)}
            for state in (own, whole if stage == 3 else own)
        ]
        state = engine.module_state_dict(exclude_frozen_parameters=frozen)
        saved = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=frozen)
        assert (saved is None) == (engine.global_rank > 0)
        for found, wanted in zip((state, saved), expected, strict=True):
            if found is not None:
                assert list(found) == list(wanted)
                assert all(torch.equal(found[name], value) for name, value in wanted.items())
    engine.destroy()


@on_ranks(2)
def test_what_a_state_dict_takes_between_uses_has_no_values(tmp_path: Path) -> None:
    """Use a state dict on a rank that saves nothing as the saving rank does; no number comes of it."""
    root = tmp_path / str(dist.get_rank())
    root.mkdir()
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
    if hasattr(module, "should_save_on_this_rank"):  # older versions of transformers write on every rank
        module.save_pretrained(str(root), is_main_process=False)
    assert not list(root.iterdir())
    assert value.cpu().clone().half().view(2, 8)[1].shape == (8,) and copy.deepcopy(entries).keys()
    assert torch.stack([value, torch.zeros(16)]).dtype == torch.float32
    file, there, plain = root / "file", torch.zeros(16), nn.Parameter(torch.zeros(16))
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
