"""Scripts that end engines and make new ones, load, save in the middle of a step, and count micro-batches."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor

from tests.habits.loop import Habit, Loop, habits_of
from tests.habits.networks import Seeded, fit, square
from tests.habits.script_gradients import ADAMW

# --- destroy and begin again --------------------------------------------------------------------------------


def another_engine_of_the_same_model(loop: Loop) -> None:
    """Destroy an engine, which keeps the weights, and initialize the model again, twice.

    A frozen part keeps its values and is trained by the next engine, and weights change in between.
    """
    net = Seeded()
    net.into.requires_grad_(False)
    for turn in range(3):
        engine = loop.train(net, optimizer=ADAMW)
        fit(loop, engine, seed=2 * turn)
        loop.end(engine)
        loop.see("weights", loop.weights(net))
        net.into.requires_grad_(True)
        with loop.deepspeed.zero.GatheredParameters([net.head.weight], modifier_rank=0):
            net.head.weight.data.fill_(0.25)


def a_model_that_is_given_again(loop: Loop) -> None:
    """Initialize the model of an engine that was not destroyed, as after Lightning's `fit`."""
    net = Seeded()
    for turn in range(3):
        fit(loop, loop.train(net), seed=2 * turn)


# --- loading ------------------------------------------------------------------------------------------------


def other_values() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(5)
    return {k: torch.randn(v.shape, generator=source) / 3 for k, v in Seeded().state_dict().items()}


def state_dicts_that_are_loaded(loop: Loop) -> None:
    """Call `load_state_dict` of the module, of its head and of a block in the middle of training."""
    engine, values = loop.train(Seeded(), optimizer=ADAMW), other_values()
    fit(loop, engine, steps=1)
    loop.see("keys", str(engine.module.load_state_dict(other_values())))
    fit(loop, engine, seed=1)
    for path in ("head", "blocks.1"):
        mine = {k.removeprefix(f"{path}."): v for k, v in values.items() if k.startswith(f"{path}.")}
        engine.module.get_submodule(path).load_state_dict(mine)
    fit(loop, engine, seed=3)


def weights_for_an_evaluation(loop: Loop) -> None:
    """An engine without an optimizer gets the weights of a loop."""
    engine = loop.train(Seeded())
    fit(loop, engine, steps=1)
    engine.save_checkpoint(loop.folder)
    config = {key: value for key, value in loop.config().items() if key != "optimizer"}
    evaluated = loop.train(Seeded(), config=config)
    assert evaluated.load_checkpoint(loop.folder, load_module_only=True)[0]
    with torch.no_grad():
        assert torch.equal(evaluated(loop.data(9)), engine(loop.data(9)))


def weights_that_one_rank_loads(loop: Loop) -> None:
    """The walk through a model of transformers: rank 0 loads each module inside `GatheredParameters`."""
    engine, values = loop.train(Seeded(), optimizer=ADAMW), other_values()
    fit(loop, engine, steps=1)
    for path, module in engine.module.named_modules():
        own = list(module.parameters(recurse=False))
        with loop.deepspeed.zero.GatheredParameters(own, modifier_rank=0):
            if loop.plain or loop.rank == 0:
                module._load_from_state_dict(values, f"{path}." if path else "", {}, True, [], [], [])
    fit(loop, engine, seed=1)


def a_state_dict_that_does_not_fit(loop: Loop) -> None:
    """Load unknown names, too few values, and a different shape."""
    engine, values = loop.train(Seeded()), other_values()
    values["unknown"] = torch.zeros(1)
    del values["into.bias"]
    loop.see("names", [sorted(names) for names in engine.module.load_state_dict(values, strict=False)])
    values["head.weight"] = torch.zeros(2, 2)
    with contextlib.suppress(RuntimeError):
        engine.module.load_state_dict(values, strict=False)
        loop.see("no error", 0)
    fit(loop, engine)


def an_optimizer_that_goes_back(loop: Loop) -> None:
    """Load an earlier `optimizer.state_dict`: moments go back, weights go on."""
    engine = loop.train(Seeded(), optimizer=ADAMW)
    fit(loop, engine)
    state = copy.deepcopy(engine.optimizer.state_dict())
    fit(loop, engine, seed=2)
    engine.optimizer.load_state_dict(state)
    fit(loop, engine, seed=4)


# --- saving in the middle -----------------------------------------------------------------------------------


def a_checkpoint_in_the_middle_of_a_step(loop: Loop) -> None:
    """Save between two micro-batches and train on; a run that loads the checkpoint begins the step anew."""
    engine = loop.train(Seeded(), gradient_accumulation_steps=2, optimizer=ADAMW)
    fit(loop, engine, steps=3)
    engine.save_checkpoint(str(loop.folder))
    loop.see("steps", engine.global_steps)
    fit(loop, engine, steps=3, seed=3)
    other = loop.train(Seeded(), gradient_accumulation_steps=2, optimizer=ADAMW)
    other.load_checkpoint(str(loop.folder))
    loop.see("loaded", other.global_steps)
    fit(loop, other, steps=4, seed=10)


def weights_from_a_checkpoint(loop: Loop) -> None:
    """Load weights by `load_state_dict_from_zero_checkpoint`, as the documentation does."""
    from_here = loop.deepspeed.utils.zero_to_fp32
    engine = loop.train(Seeded())
    fit(loop, engine)
    engine.save_checkpoint(str(loop.folder))
    saved = loop.weights(engine.module)
    fit(loop, engine, steps=1, seed=2)
    model = from_here.load_state_dict_from_zero_checkpoint(engine.module, str(loop.folder))
    found = loop.weights(model)
    loop.see("same", [name for name, value in saved.items() if not torch.equal(value, found[name])])
    plain = from_here.load_state_dict_from_zero_checkpoint(Seeded(), str(loop.folder))
    loop.see("plain", {name: value.detach() for name, value in plain.named_parameters()})


# --- who counts ---------------------------------------------------------------------------------------------


def steps_that_the_caller_counts(loop: Loop) -> None:
    """Set `managed_gradient_accumulation: false`, so that every `step` updates."""
    counts = {"gradient_accumulation_steps": 2, "managed_gradient_accumulation": False}
    engine = loop.train(Seeded(), **counts, zero_optimization={"overlap_comm": False})
    seed = 0
    for count in (3, 1, 2):
        for _ in range(count):
            engine.backward(square(engine(loop.data(seed))))
            loop.see("boundary", engine.is_gradient_accumulation_boundary())
            seed += 1
        engine.step()
        loop.see("steps", [engine.global_steps, engine.micro_steps])


def what_is_asserted(loop: Loop) -> None:
    """Make mistakes that DeepSpeed asserts, and that scripts catch as AssertionError."""
    engine = loop.train(Seeded(), gradient_accumulation_steps=2)
    with pytest.raises(AssertionError):
        engine.backward(engine(loop.data(0)))
    with pytest.raises(AssertionError), engine.no_sync():
        engine.step()
    counts = {"managed_gradient_accumulation": False, "zero_optimization": {"overlap_comm": False}}
    engine = loop.train(Seeded(), **counts)
    with pytest.raises(AssertionError):
        engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(AssertionError), engine.coalesce_grad_reduction():
        pass


# --- names --------------------------------------------------------------------------------------------------


def parameters_with_names(loop: Loop) -> None:
    """Pass `model_parameters=model.named_parameters()`, of all and of a part, which alone is clipped."""
    for part in ("", "head"):
        net = Seeded()
        named = iter([(name, p) for name, p in net.named_parameters() if name.startswith(part)])
        fit(loop, loop.train(net, model_parameters=named, gradient_clipping=0.1), steps=3)


REVERTS = "its masters do not follow, and the next step puts the old weights back; stage 3 raises"
ZERO, BELOW_3 = (0,), (0, 1, 2)


def an_engine_that_is_compiled(loop: Loop) -> None:
    """Call `engine.compile` twice, as accelerate does for torch_compile, and train."""
    engine = loop.train(Seeded(), gradient_accumulation_steps=2)
    for _ in range(0 if loop.plain else 2):
        engine.compile(backend="aot_eager", compile_kwargs={"dynamic": False})
        assert engine.is_compiled
    is_own = getattr(loop.deepspeed, "__name__", "").startswith("zerodrift")  # DeepSpeed's hooks recompile
    limits = {"recompile_limit": 2, "fail_on_recompile_limit_hit": True} if is_own else {}
    with torch._dynamo.config.patch(limits):
        fit(loop, engine, steps=4)


HABITS = habits_of(
    globals(),
    Habit(an_engine_that_is_compiled),
    Habit(a_model_that_is_given_again, alike=BELOW_3, why="it crashes on hooks of the older engine"),
    Habit(state_dicts_that_are_loaded, alike=ZERO, why=REVERTS),
    Habit(weights_for_an_evaluation, alike=(), why="stages 1-2 ask for an optimizer", own=True),
    Habit(
        weights_that_one_rank_loads,
        alike=(),
        why="nothing is sent below stage 3; there masters do not follow",
    ),
    Habit(a_state_dict_that_does_not_fit, alike=ZERO, why=REVERTS),
    Habit(an_optimizer_that_goes_back, stages=ZERO),
    Habit(weights_from_a_checkpoint, alike=(1, 2), why="stage 0 saves none, stage 3 loads into no slices"),
    Habit(parameters_with_names, alike=(1, 2, 3), why="stage 0 clips by the norm of the whole model"),
    Habit(what_is_asserted, alike=BELOW_3[:2], why="`no_sync` itself is asserted", own=True),
)
