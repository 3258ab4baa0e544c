"""Config: reading, checking and documenting keys. `load` turns a file or dict into a checked `Config`."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.config import fields, schema
    from zerodrift.config.loader import (
        Additions,
        ConfigSource,
        load,
        nest,
        without_block,
        without_torch_classes,
    )
    from zerodrift.config.parser import parse_json
    from zerodrift.config.plain_tree import collect_written, join, override, plain, shown
    from zerodrift.config.schema import (
        BackendName, Bf16, Config, DataTypes, Experts, Flag, Fp16, MatrixProducts, Natural, NonNegativeFloat,
        OffloadOptimizer, Optimizer, Pipeline, Positive, PositiveFloat, Precision, RULES, Reduce, Rule,
        Scheduler, Sharding, TorchAutocast, ZeroOptimization,
    )  # fmt: skip
    from zerodrift.config.tree import Block, Keys, TreeReader, tree_of

__getattr__, __dir__, __all__ = face(__name__)
