"""CONTRIBUTING names the files that an addition touches: a toy of each kind is added.

The package is copied, the files that the recipes name are edited, and nothing else; then a process of its own
with torch imported uses what was added. All toys are in one copy: no two of them edit the same file.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.ranks.harness import forks, redirect

ROOT = Path(__file__).parents[2]

PRELUDE = """
import torch
from torch import nn
import zerodrift
from zerodrift import ConfigError, cost, load, make_plan
from tests.unit.models import moe
from tests.unit.tools import load_tool

page = load_tool("config_page")
render_config = page.render_config

def refused(call, *told):
    try:
        call()
    except ConfigError as error:
        assert all(text in str(error) for text in told), error
    else:
        raise AssertionError(f"taken: {told}")
"""
"""First lines of the uses below."""

Edits = dict[str, tuple[tuple[str, str], ...]]
"""File of the package -> (text, its replacement)."""

E5M2_IN_GATHERS: Edits = {
    "dtypes.py": (
        ('    "gather": (*_TRAINING, *_FLAT),\n', '    "gather": (*_TRAINING, *_FLAT, DType.E5M2_128),\n'),
    ),
}

USE_E5M2 = """
config = {"precision": {"mode": "bf16", "gather": "e5m2-128"}, "zero_optimization": {"stage": 3}}
plan = make_plan(config, moe(), world_size=2)
cells = {row.columns.cells()["gather"] for row in plan.rows}
assert cells == {"e5m2-128", "bf16"}, cells  # norms are vectors
traffic = {line.dtype: line.bytes for line in cost(plan).traffic if line.purpose == "forward"}
assert set(traffic) == {"e5m2-128", "bf16"}, traffic
assert "| `gather` | fp32, bf16, fp16, fp8, mxfp8, int8 or e5m2-128 |" in render_config()
other = {"precision": {"grad": "e5m2-128"}}
refused(lambda: load(other), "`precision.grad`: must be fp32, bf16 or fp16")
"""

SIGN_OF_A_TRACE: Edits = {
    "optimizers.py": (
        (
            "ALGORITHMS = (ADAMW, ADAM, SGD, LION, MUON)",
            "TOY = Algorithm(\n"
            '    "Toy",\n'
            '    types=("Toy",),\n'
            '    arguments=("lr", "momentum"),\n'
            '    defaults={"lr": 1e-3, "momentum": 0.5},\n'
            '    moments=("trace",),\n'
            ")\n\n"
            "ALGORITHMS = (ADAMW, ADAM, SGD, LION, MUON, TOY)",
        ),
    ),
    "optim/updates.py": (
        ("import ADAM, ADAMW, LION, SGD, Algorithm", "import ADAM, ADAMW, LION, SGD, TOY, Algorithm"),
        (
            "\nARITHMETIC: Mapping",
            "\ndef _toy(numbers, weight, moments, gradient, root):\n"
            "    moments[0].mul_(numbers.keep1).add_(gradient)\n"
            "    weight.add_(moments[0].sign(), alpha=numbers.step)\n"
            "\n\n"
            "def _toy_wanted(numbers, before, moments, gradient, root):\n"
            "    return moments[0].sign() * numbers.step\n"
            "\n\n"
            "ARITHMETIC: Mapping",
        ),
        (
            "    LION: Arithmetic(",
            "    TOY: Arithmetic(\n"
            "        lambda h: Coefficients(keep1=h.momentum, step=-h.lr), _toy, _toy_wanted\n"
            "    ),\n"
            "    LION: Arithmetic(",
        ),
    ),
}

USE_TOY = """
config = {
    "precision": {"mode": "fp32", "statistics": True},
    "gradient_clipping": 0,
    "optimizer": {"type": "toy", "params": {"lr": 0.01, "momentum": 0.9}},
}
torch.manual_seed(1)
model = nn.Linear(16, 16, bias=False)
weight = model.weight.detach().clone()
trace = torch.zeros_like(weight)
engine = zerodrift.initialize(model, config=config, device="cpu", quiet=True)
for batch in torch.randn(3, 4, 16):
    engine.backward(engine(batch).square().sum())
    engine.step()
    plain = weight.clone().requires_grad_()
    (batch @ plain.T).square().sum().backward()
    trace = 0.9 * trace + plain.grad
    weight = weight - 0.01 * trace.sign()
assert torch.equal(engine.parameter("weight").master, weight)
assert torch.equal(engine.parameter("weight").state["trace"], trace)
engine.update_statistics()
assert cost(engine.plan).rest.state == 256 * 4, cost(engine.plan).rest
assert "Muon or Toy." in render_config()
elsewhere = {**config, "precision": {}, "backend": "fsdp2"}
refused(
    lambda: make_plan(elsewhere, nn.Linear(2, 2), world_size=1),
    "`optimizer.type`: must be an optimizer of torch",
)
"""


def recipe(title: str) -> str:
    """Return a paragraph of CONTRIBUTING, up to the conditions that few changes meet."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paragraph = " ".join(text.partition(f"**{title}.**")[2].partition("\n\n")[0].split())
    return paragraph.partition(" Only where ")[0]


RECIPES: dict[str, tuple[Edits, str]] = {
    "A column value": (E5M2_IN_GATHERS, USE_E5M2),
    "An optimizer": (SIGN_OF_A_TRACE, USE_TOY),
}


@pytest.mark.long
def test_the_files_of_each_recipe_are_enough(tmp_path: Path) -> None:
    package = tmp_path / "zerodrift"
    shutil.copytree(ROOT / "src" / "zerodrift", package)  # compiled files too: they stay valid
    edited: set[str] = set()
    for title, (edits, _) in RECIPES.items():
        assert set(re.findall(r"`([\w/]+\.(?:py|h))`", recipe(title))) == set(edits), title
        assert not edited & edits.keys(), title
        edited |= edits.keys()
        for name, changes in edits.items():
            text = (package / name).read_text(encoding="utf-8")
            for there, instead in changes:
                assert text.count(there) == 1, f"{name}: {there!r}"
                text = text.replace(there, instead)
            (package / name).write_text(text, encoding="utf-8")
    said = tmp_path / "said"
    uses = [PRELUDE, *(use for _, use in RECIPES.values())]
    process = forks().Process(target=_use, args=("".join(uses), tmp_path, said))
    process.start()
    process.join(timeout=300)
    process.kill()
    assert process.exitcode == 0, said.read_text()[-3000:]


def _use(code: str, folder: Path, said: Path) -> None:
    """Run code with the package in a folder, in a process that has everything else imported."""
    redirect(said, said)
    for name in list(sys.modules):
        if name.split(".")[0] in ("zerodrift", "tests"):
            del sys.modules[name]
    sys.path[:0] = [str(folder), str(ROOT)]
    exec(compile(code, "use", "exec"), {"__name__": "use"})
    import zerodrift

    assert Path(zerodrift.__file__).parent == folder / "zerodrift"
