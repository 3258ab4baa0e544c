"""All scripts, by name."""

from __future__ import annotations

from tests.dropin import configs, engines, gradients, parameters, pieces, schedules
from tests.dropin.script import Script

KINDS = (parameters, pieces, gradients, schedules, configs, engines)

SCRIPTS: dict[str, Script] = {script.name: script for kind in KINDS for script in kind.SCRIPTS}
