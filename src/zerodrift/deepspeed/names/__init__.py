"""DeepSpeed's names: the tables of them, and the modules that are made of the tables."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.deepspeed.names.modules import (
        DeepSpeedModules, MissingCheckpointError, MisuseError, NotHereError, Placeholder,
        RefusedConfigError, absent, lookup, unknown,
    )  # fmt: skip
    from zerodrift.deepspeed.names.tables import ENGINE_ABSENT, ROOT

__getattr__, __dir__, __all__ = face(__name__)
