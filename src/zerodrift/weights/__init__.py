"""Weights of a model: loaded from safetensors in slices, exported, and converted between checkpoints."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.weights.boxes import Box
    from zerodrift.weights.converter import (
        ConversionResult, ConvertOptions, convert, fill_module, open_source, set_parameter, to_checkpoint,
    )  # fmt: skip
    from zerodrift.weights.deepspeed.checkpoint import open_deepspeed
    from zerodrift.weights.exporter import Exported, export, exported_dtype, whole_values
    from zerodrift.weights.load import (
        LoadedWeights, SafetensorsWeights, initial_values, load_weights, open_weights,
    )  # fmt: skip
    from zerodrift.weights.matching import ExpectedTensor, expected_tensors, match
    from zerodrift.weights.quantised import decode_quantised
    from zerodrift.weights.reader import SafetensorsReader
    from zerodrift.weights.sources import TrainingState, open_zerodrift
    from zerodrift.weights.writer import size_in_bytes

__getattr__, __dir__, __all__ = face(__name__)
