"""Scripts that end engines and make new ones, load, save in the middle of a step, and count micro-batches."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tests.dropin.gradients import ADAMW
from tests.dropin.parameters import Net
from tests.dropin.script import WIDTH, Run, Script, square

# --- destroy and begin again --------------------------------------------------------------------------------


def another_engine_of_the_same_model(run: Run) -> None:
    """Destroy an engine, which keeps the weights, and initialize the model again, twice."""
    net = Net()
    for turn in range(3):
        engine = run.engine(net)
        run.train(engine, 2, first=2 * turn)
        run.end(engine)
        run.tell("weights", run.weights(net))


def a_model_that_is_given_again(run: Run) -> None:
    """Initialize the model of an engine that was not destroyed, as after Lightning's `fit`."""
    net = Net()
    for turn in range(3):
        run.train(run.engine(net), 2, first=2 * turn)


def weights_that_are_changed_between(run: Run) -> None:
    """Change weights inside `GatheredParameters` between two engines."""
    net = Net()
    engine = run.engine(net)
    run.train(engine, 1)
    run.end(engine)
    with run.deepspeed.zero.GatheredParameters([net.head.weight], modifier_rank=0):
        net.head.weight.data.fill_(0.25)
    run.train(run.engine(net), 2, first=1)


def another_stage_afterwards(run: Run) -> None:
    """Go from the stage to stage 1, and back."""
    net, first = Net(), run.stage
    for turn, stage in enumerate((first, 1, first)):
        engine = run.engine(net, zero_optimization={"stage": stage})
        run.train(engine, 1, first=turn)
        run.end(engine)
    run.tell("weights", run.weights(net))


def a_frozen_part_in_both(run: Run) -> None:
    """Freeze a part, which keeps its values, and train it with the next engine."""
    net = Net()
    net.into.requires_grad_(False)
    engine = run.engine(net, optimizer=ADAMW)
    run.train(engine, 2)
    run.end(engine)
    net.into.requires_grad_(True)
    run.train(run.engine(net, optimizer=ADAMW), 2, first=2)


# --- loading ------------------------------------------------------------------------------------------------


def other_values() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(5)
    return {k: torch.randn(v.shape, generator=source) / 3 for k, v in Net().state_dict().items()}


def a_state_dict_that_is_loaded(run: Run) -> None:
    """Call `engine.module.load_state_dict(sd)` in the middle of training."""
    engine = run.engine(Net())
    run.train(engine, 1)
    run.tell("keys", str(engine.module.load_state_dict(other_values())))
    run.train(engine, 2, first=1)


def a_part_that_is_loaded(run: Run) -> None:
    """Call `engine.module.head.load_state_dict`, and that of a block."""
    engine, values = run.engine(Net(), optimizer=ADAMW), other_values()
    run.train(engine, 1)
    for path in ("head", "blocks.1"):
        mine = {k.removeprefix(f"{path}."): v for k, v in values.items() if k.startswith(f"{path}.")}
        engine.module.get_submodule(path).load_state_dict(mine)
    run.train(engine, 2, first=1)


def a_head_that_grows_between(run: Run) -> None:
    """The same parameter with more rows for the next engine, as transformers resizes an embedding."""
    net = Net()
    net.head = nn.Linear(WIDTH, WIDTH, bias=False)
    first = run.engine(net)
    run.train(first, 2)
    run.end(first)
    net.head.weight.data = torch.cat([net.head.weight.data, net.head.weight.data[:2]])
    run.train(run.engine(net), 2, first=2)


def weights_for_an_evaluation(run: Run) -> None:
    """An engine without an optimizer gets the weights of a run."""
    engine = run.engine(Net())
    run.train(engine, 1)
    engine.save_checkpoint(run.folder)
    config = {key: value for key, value in run.config().items() if key != "optimizer"}
    evaluated = run.deepspeed.initialize(model=Net(), config=config)[0]
    run.engines.append(evaluated)
    assert evaluated.load_checkpoint(run.folder, load_module_only=True)[0]
    with torch.no_grad():
        assert torch.equal(evaluated(run.data(9)), engine(run.data(9)))


def weights_that_one_rank_loads(run: Run) -> None:
    """The walk through a model of transformers: rank 0 loads each module inside `GatheredParameters`."""
    engine, values = run.engine(Net(), optimizer=ADAMW), other_values()
    run.train(engine, 1)
    for path, module in engine.module.named_modules():
        own = list(module.parameters(recurse=False))
        with run.deepspeed.zero.GatheredParameters(own, modifier_rank=0):
            if run.is_plain or run.rank == 0:
                module._load_from_state_dict(values, f"{path}." if path else "", {}, True, [], [], [])
    run.train(engine, 2, first=1)


def a_state_dict_that_does_not_fit(run: Run) -> None:
    """Load unknown names, too few values, and a different shape."""
    engine, values = run.engine(Net()), other_values()
    values["unknown"] = torch.zeros(1)
    del values["into.bias"]
    run.tell("names", [sorted(names) for names in engine.module.load_state_dict(values, strict=False)])
    values["head.weight"] = torch.zeros(2, 2)
    with contextlib.suppress(RuntimeError):
        engine.module.load_state_dict(values, strict=False)
        run.tell("no error", 0)
    run.train(engine, 2)


def an_optimizer_that_goes_back(run: Run) -> None:
    """Load an earlier `optimizer.state_dict`: moments go back, weights go on."""
    engine = run.engine(Net(), optimizer=ADAMW)
    run.train(engine, 2)
    state = copy.deepcopy(engine.optimizer.state_dict())
    run.train(engine, 2, first=2)
    engine.optimizer.load_state_dict(state)
    run.train(engine, 2, first=4)


def what_is_in_client_state(run: Run) -> None:
    """Save a script's arguments, paths, numbers of numpy, and random states."""
    engine = run.engine(Net())
    run.train(engine, 1)
    state = {
        "args": argparse.Namespace(lr=0.1, out=Path("/out")),
        "best": np.float64(0.5),
        "history": np.arange(3.0),
        "random": [random.Random(1).getstate(), np.random.RandomState(1).get_state()],
    }
    found = state
    if not run.is_plain:
        engine.save_checkpoint(str(run.folder), client_state=state)
        found = engine.load_checkpoint(str(run.folder))[1]
    run.tell("found", {key: repr(found[key]) for key in state})


# --- saving in the middle -----------------------------------------------------------------------------------


def a_checkpoint_in_the_middle_of_a_step(run: Run) -> None:
    """Save between two micro-batches and train on; a run that loads the checkpoint begins the step anew."""
    engine = run.engine(Net(), gradient_accumulation_steps=2, optimizer=ADAMW)
    run.train(engine, 3)
    engine.save_checkpoint(str(run.folder))
    run.tell("steps", engine.global_steps)
    run.train(engine, 3, first=3)
    other = run.engine(Net(), gradient_accumulation_steps=2, optimizer=ADAMW)
    other.load_checkpoint(str(run.folder))
    run.tell("loaded", other.global_steps)
    run.train(other, 4, first=10)


def weights_from_a_checkpoint(run: Run) -> None:
    """Load weights by `load_state_dict_from_zero_checkpoint`, as the documentation does."""
    from_here = run.deepspeed.utils.zero_to_fp32
    engine = run.engine(Net())
    run.train(engine, 2)
    engine.save_checkpoint(str(run.folder))
    saved = run.weights(engine.module)
    run.train(engine, 1, first=2)
    model = from_here.load_state_dict_from_zero_checkpoint(engine.module, str(run.folder))
    found = run.weights(model)
    run.tell("same", [name for name, value in saved.items() if not torch.equal(value, found[name])])
    plain = from_here.load_state_dict_from_zero_checkpoint(Net(), str(run.folder))
    run.tell("plain", {name: value.detach() for name, value in plain.named_parameters()})


# --- who counts ---------------------------------------------------------------------------------------------


def steps_that_the_caller_counts(run: Run) -> None:
    """Set `managed_gradient_accumulation: false`, so that every `step` updates."""
    counts = {"gradient_accumulation_steps": 2, "managed_gradient_accumulation": False}
    engine = run.engine(Net(), **counts, zero_optimization={"overlap_comm": False})
    seed = 0
    for count in (3, 1, 2):
        for _ in range(count):
            engine.backward(square(engine(run.data(seed))))
            run.tell("boundary", engine.is_gradient_accumulation_boundary())
            seed += 1
        engine.step()
        run.tell("steps", [engine.global_steps, engine.micro_steps])
    with asserted(run):
        engine.set_gradient_accumulation_boundary(True)
    with asserted(run), engine.coalesce_grad_reduction():
        pass


def what_is_asserted(run: Run) -> None:
    """Make mistakes that DeepSpeed asserts, and that scripts catch as AssertionError."""
    engine = run.engine(Net(), gradient_accumulation_steps=2)
    output = engine(run.data(0))
    with asserted(run):
        engine.backward(output)
    with asserted(run), engine.no_sync():
        engine.step()


@contextlib.contextmanager
def asserted(run: Run) -> Iterator[None]:
    """Report whether the body ends in an AssertionError."""
    try:
        yield
    except AssertionError:
        run.tell("asserts", True)


# --- configs ------------------------------------------------------------------------------------------------


TEXTS = (
    """{
  // a line
  "train_micro_batch_size_per_gpu": 4, # another
  /* and
     several */
  "gradient_clipping": 0.0,
  "zero_allow_untested_optimizer": true,
  "optimizer": {"type": "SGD", "params": {"lr": 1e-1,}},
  "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0,},
}""",
    """# without braces, quotes and commas
train_micro_batch_size_per_gpu: 4
gradient_clipping: 0.0
zero_allow_untested_optimizer: true
optimizer: {
  type: SGD
  params: {lr: 0.1}
}
zero_optimization: {
  stage: STAGE
  stage3_param_persistence_threshold: 0
}
""",
    """{
  train_micro_batch_size_per_gpu: 4
  'gradient_clipping': 0.0
  "zero_allow_untested_optimizer": true, optimizer: {type: SGD
    params: {"lr": 0.1}}
  zero_optimization: {"stage": STAGE, "stage3_param_persistence_threshold": 0}
}""",
)


def files_that_are_no_json(run: Run) -> None:
    """Read a config of JSON with comments and trailing commas, and of Hjson."""
    for number, text in enumerate(TEXTS):
        _train_by_a_file(run, text.replace("STAGE", str(run.stage)), number)


def a_file_that_is_json(run: Run) -> None:
    _train_by_a_file(run, json.dumps(run.config()))


def _train_by_a_file(run: Run, text: str, number: int = 0) -> None:
    path = run.folder / f"config-{number}.json"
    if run.rank == 0:
        path.write_text(text)
    torch.distributed.barrier()
    if run.is_plain:
        engine = run.engine(Net())
    else:
        engine = run.deepspeed.initialize(model=Net(), config=str(path))[0]
        run.engines.append(engine)
    run.train(engine, 1, first=number)


# --- names --------------------------------------------------------------------------------------------------


def parameters_with_names(run: Run) -> None:
    """Pass `model_parameters=model.named_parameters()`, of all and of a part."""
    for part in ("", "head"):
        net = Net()
        named = [(name, p) for name, p in net.named_parameters() if name.startswith(part)]
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name.startswith(part))
        run.train(run.engine(net, model_parameters=iter(named), optimizer=ADAMW))


REVERTS = "its masters do not follow, and the next step puts the old weights back; stage 3 raises"
ZERO, BELOW_3 = (0,), (0, 1, 2)

SCRIPTS = (
    Script(another_engine_of_the_same_model),
    Script(a_model_that_is_given_again, alike=BELOW_3, why="it crashes on hooks of the older engine"),
    Script(weights_that_are_changed_between),
    Script(another_stage_afterwards, alike=BELOW_3, why="stages below 3 take no slices"),
    Script(a_frozen_part_in_both),
    Script(a_state_dict_that_is_loaded, alike=ZERO, why=REVERTS),
    Script(a_part_that_is_loaded, alike=ZERO, why=REVERTS),
    Script(a_head_that_grows_between, stages=BELOW_3),
    Script(weights_for_an_evaluation, alike=(), why="stages 1-2 ask for an optimizer", own=True),
    Script(
        weights_that_one_rank_loads,
        alike=(),
        why="nothing is sent below stage 3; there masters do not follow",
    ),
    Script(a_state_dict_that_does_not_fit, alike=ZERO, why=REVERTS),
    Script(an_optimizer_that_goes_back, stages=ZERO),
    Script(what_is_in_client_state, stages=(0, 3)),
    Script(a_checkpoint_in_the_middle_of_a_step),
    Script(weights_from_a_checkpoint, alike=(1, 2), why="stage 0 saves none, stage 3 loads into no slices"),
    Script(steps_that_the_caller_counts),
    Script(what_is_asserted, alike=BELOW_3[:2], why="`no_sync` itself is asserted"),
    *([Script(files_that_are_no_json)] if importlib.util.find_spec("hjson") else []),
    Script(a_file_that_is_json),
    Script(parameters_with_names),
)
