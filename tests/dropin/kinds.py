"""All scripts, by name."""

from __future__ import annotations

from tests.dropin import engines, gradients, parameters, schedules
from tests.dropin.script import Script

KINDS = (parameters, gradients, schedules, engines)

SCRIPTS: dict[str, Script] = {script.name: script for kind in KINDS for script in kind.SCRIPTS}
