"""Recorded facts of DeepSpeed 0.19.6 beyond plain loops, and the deliberate differences of the drop-in."""

from __future__ import annotations

import base64
import enum
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerodrift
import zerodrift.deepspeed as deepspeed
from tests.dropin.parameters import Net
from tests.dropin.script import WIDTH, square
from tests.ranks.harness import run_ranks
from zerodrift.deepspeed.config import written_config
from zerodrift.deepspeed.engine import OWN
from zerodrift.deepspeed.initialization import TORCH_CLASSES, _without_drop_in_keys
from zerodrift.errors import ConfigError, ModelError, UnsupportedError
from zerodrift.optimizers import TORCH_OPTIMIZERS, TORCH_SCHEDULES


def config(stage: int, **rest: Any) -> dict[str, Any]:
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": sgd, "zero_optimization": {"stage": stage}}
    return base | rest


def make(stage: int, model: torch.nn.Module | None = None, **rest: Any) -> Any:
    return deepspeed.initialize(model=model or Net(), config=config(stage, **rest))[0]


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(engine: Any, seed: int = 0) -> float:
    loss = square(engine(data(seed)))
    engine.backward(loss)
    engine.step()
    return float(loss)


# --- autocast -----------------------------------------------------------------------------------------------


def autocast_is_off_inside(stage: int) -> None:
    """Autocast is off inside, with one warning per engine: the bits are those of a run without it."""
    for mode in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {}):
        runs = []
        for outer in (None, torch.bfloat16, torch.float16):
            engine = make(stage, **mode)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with torch.autocast("cpu", outer or torch.bfloat16, enabled=outer is not None):
                    runs.append([step(engine, seed) for seed in range(2)])
            told = [warning for warning in caught if "torch.autocast around" in str(warning.message)]
            assert len(told) == (outer is not None), told
            engine.destroy()
        assert runs[0] == runs[1] == runs[2]


# --- loading and the end, in 16 bits ------------------------------------------------------------------------


def masters_take_what_is_loaded(stage: int) -> None:
    """Masters keep a value that is loaded in fp32 as it is; a value that is not loaded keeps every bit."""
    torch.manual_seed(1)
    engine = make(stage, bf16={"enabled": True})
    step(engine)
    kept = deepspeed.utils.safe_get_full_fp32_param(engine.module.head.weight)
    other = {k: torch.randn_like(v) for k, v in Net().state_dict().items() if k != "head.weight"}
    engine.module.load_state_dict(other, strict=False)
    for name, parameter in engine.module.named_parameters():
        expected = kept if name == "head.weight" else other[name]
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(parameter), expected), name
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        assert torch.equal(engine.module.into.weight.float(), other["into.weight"].bfloat16().float())
    engine.destroy()


def a_load_in_a_context_ends_with_it(stage: int) -> None:
    """Weights that were loaded inside `GatheredParameters` do not come back with a later load."""
    engine = make(stage, bf16={"enabled": True})
    values = {name: torch.randn_like(value) for name, value in Net().state_dict().items()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.load_state_dict(values)
    step(engine)
    kept = deepspeed.utils.safe_get_full_fp32_param(engine.module.into.weight)
    engine.module.load_state_dict({"head.weight": values["head.weight"]}, strict=False)
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(engine.module.into.weight), kept)
    assert torch.equal(
        deepspeed.utils.safe_get_full_fp32_param(engine.module.head.weight), values["head.weight"]
    )
    engine.destroy()


def memory_that_is_assigned_is_named_where_values_are_saved(stage: int) -> None:
    """A trained parameter's, whose former memory a script keeps; a frozen one's is taken over."""
    net = Net()
    net.blocks[0].requires_grad_(False)
    engine = make(stage, net)
    net.blocks[0].scale.data = torch.full((WIDTH,), 0.5)
    assert torch.equal(engine.module_state_dict()["blocks.0.scale"], torch.full((WIDTH,), 0.5))
    held = net.head.weight.data
    net.head.weight.data = torch.zeros_like(held)
    with pytest.raises(ModelError, match=r"`head.weight`: must have the memory.*Assign the former `.data`"):
        engine.module_state_dict()
    net.head.weight.data = held
    assert torch.equal(engine.module_state_dict()["head.weight"], held)
    engine.destroy()


def a_model_in_slices_says_so(stage: int) -> None:
    """A destroyed engine leaves a model in slices, which can be gathered, changed, and used again."""
    net = Net()
    engine = make(stage, net, bf16={"enabled": True})
    step(engine)
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
    like = Net().bfloat16()
    like.load_state_dict(weights)
    engines = [make(3, each, bf16={"enabled": True}) for each in (net, like)]
    assert step(engines[0], 1) == step(engines[1], 1)
    for each in engines:
        each.destroy()


def data_in_pieces_is_nobody_elses(made: bool) -> None:
    """`param.data` in pieces has its shape, dtype and device, and cannot become another's."""
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        net = Net()
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
    assert step(engine) == step(make(3, Net()))
    engine.destroy()


def what_is_held_is_read_only(made: bool) -> None:
    """`param.ds_tensor` is read-only, and methods that would move values name an alternative."""
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        net = Net()
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
    step(engine)
    assert (not before.numel()) or not torch.equal(
        weight.ds_tensor, before
    )  # it is what the engine holds now
    engine.destroy()


class Renames(Net):
    """A model whose `state_dict` renames keys and leaves one out, as TRL's with a value head."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {
            name.replace("blocks.", "layers."): value for name, value in state.items() if "into" not in name
        }


def a_state_dict_of_the_models_own(stage: int) -> None:
    """A `state_dict` is whole and has the model's keys; files of stage 3 have the names of modules, as
    with DeepSpeed."""
    net = Renames()
    net.head.requires_grad_(False)
    engine = make(stage, net)
    step(engine)
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


# --- gradients ----------------------------------------------------------------------------------------------


def gradients_are_there_at_stage_0_and_named_elsewhere(stage: int) -> None:
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


FACTS: dict[Callable[..., None], tuple[object, ...]] = {
    autocast_is_off_inside: (0, 3),
    masters_take_what_is_loaded: (0, 2, 3),
    a_load_in_a_context_ends_with_it: (0, 2, 3),
    memory_that_is_assigned_is_named_where_values_are_saved: (0, 2),
    a_model_in_slices_says_so: (3,),
    data_in_pieces_is_nobody_elses: (False, True),
    what_is_held_is_read_only: (False, True),
    a_state_dict_of_the_models_own: (0, 2, 3),
    gradients_are_there_at_stage_0_and_named_elsewhere: (0, 1, 3),
}
"""Fact that is checked on ranks -> stages, or engines, at which it holds."""


@pytest.mark.parametrize(
    ("fact", "of"),
    [(fact, of) for fact, given in FACTS.items() for of in given],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_fact(fact: Callable[..., None], of: object) -> None:
    run_ranks(fact, 2, of)


# --- configs ------------------------------------------------------------------------------------------------


class Device(str, enum.Enum):
    none = "none"
    cpu = "cpu"


@pytest.mark.parametrize(
    ("zero", "offloads"),
    [
        ({"cpu_offload": True}, True),
        ({"cpu_offload": True, "cpu_offload_use_pin_memory": True}, True),
        ({"cpu_offload": False, "cpu_offload_param": True}, False),
        ({"offload_optimizer": {"device": Device.cpu}}, True),
        ({"offload_optimizer": {"device": Device.none}, "offload_param": {"device": Device.cpu}}, False),
        ({"offload_param": {"device": "cpu", "pin_memory": True}}, False),
    ],
)
def test_offload_in_every_spelling(zero: dict[str, Any], offloads: bool) -> None:
    written = {**zero, "stage": 3}
    found = written_config(None, {"zero_optimization": written}, None)
    policy = zerodrift.resolve(zerodrift.load(found), zerodrift.MeshShape(shard=2))
    assert policy.sharding.offload is offloads
    assert written == {**zero, "stage": 3}  # what the caller has is as it was


def test_why_nothing_moves_is_said() -> None:
    found = zerodrift.load({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    (use,) = [use for use in found.keys if use.path.endswith("offload_param.device")]
    assert use.status == "ignored"
    assert use.because.startswith("parameters rest on their device, which changes")


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_muon_takes_its_method(method: str) -> None:
    zerodrift.load({"optimizer": {"type": "Muon", "params": {"lr": 0.02, "ns_method": method}}})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{a: 1 # one\n b: two words // and\n}", {"a": 1, "b": "two words // and"}),
        ('{"a": [1, 2,], /* so */ "b": {c: null}}', {"a": [1, 2], "b": {"c": None}}),
        ('{"a": 1, /* so */ "a": 2}', None),
        ('{"a": 1', None),
    ],
)
def test_hjson(text: str, value: Any, tmp_path: Path) -> None:
    """Hjson is read by the package that DeepSpeed requires; a key that is there twice is an error."""
    pytest.importorskip("hjson")
    coded = base64.urlsafe_b64encode(text.encode()).decode()
    (tmp_path / "config.json").write_text(text)
    for way in (coded, str(tmp_path / "config.json")):
        if value is None:
            with pytest.raises(ConfigError):
                zerodrift.load(written_config(None, way, None))
        else:
            assert written_config(None, way, None) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [("{a: 1 // one\n}", r"pip install 'zerodrift\[hjson\]'"), ('{"train_batch_size": 4, ]', "line 1")],
)
def test_a_file_that_is_no_json_is_told_by_the_first_reader(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hjson" in said:
        monkeypatch.setitem(sys.modules, "hjson", None)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"must be valid JSON.*{said}"):
        written_config(None, str(tmp_path / "config.json"), None)


def test_a_plan_knows_the_classes_that_only_torch_has() -> None:
    """The command `plan` imports no torch, so it has their names; those that need a function are left out."""
    needs_function = {"LambdaLR", "MultiplicativeLR", "ChainedScheduler", "SequentialLR", "_LRScheduler"}
    for block, known in (("optimizer", TORCH_OPTIMIZERS), ("scheduler", TORCH_SCHEDULES)):
        module, base, own = TORCH_CLASSES[block]
        kinds = {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}
        names = {name for name, kind in kinds.items() if issubclass(kind, base) and kind is not base}
        ours = {name for name in names if {name, name.lower()} & own.keys()}
        assert names - ours - needs_function == set(known)


def test_a_key_that_a_file_has_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"bf16": {"enabled": true}, "fp16": {}, "bf16": {}}')
    with pytest.raises(ConfigError, match="`bf16`: must be written once"):
        zerodrift.load(_without_drop_in_keys(written_config(None, str(path), None)))


# --- what messages advise -----------------------------------------------------------------------------------


def test_messages_name_what_the_drop_ins_engine_has() -> None:
    """Every `engine.x` in a text of the rooms that the drop-in's engine uses exists there."""
    source = Path(zerodrift.__file__).parent
    rooms = ("engine", "optim", "plan", "policy", "comm", "deepspeed", "experts")
    texts = [path.read_text() for room in rooms for path in (source / room).rglob("*.py")]
    told = {name for text in texts for name in re.findall(r'"[^"\n]*`engine\.([a-z_]+)', text)}
    has = {*dir(deepspeed.DeepSpeedEngine), *OWN, "optimizer", "module", "micro_batches"}
    assert "gathered" in told and told <= has, sorted(told - has)
