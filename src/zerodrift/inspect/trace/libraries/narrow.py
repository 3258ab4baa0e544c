"""Narrow weights of other libraries: bitsandbytes, torchao and TransformerEngine, known by names alone.

Their tensors say the dtype of a container, such as uint8, or that of the values before they were quantised.
The classes were read in bitsandbytes 0.50, torchao 0.18 and TransformerEngine 2.8.
"""

from __future__ import annotations

from typing import Any

from zerodrift.inspect.trace.records import dtype_name

_ELEMENTS = {"float8_e4m3fn": "fp8", "float8_e5m2": "e5m2", "int8": "int8", "float4_e2m1fn_x2": "fp4"}


def narrow_name(tensor: Any) -> str:
    """Return the format of a library's quantised tensor, such as `nf4-64`; `""` for any other tensor.

    The words are those of zerodrift's formats where blocks and numbers are the same.
    """
    kind = type(tensor)
    library, name = kind.__module__.partition(".")[0], kind.__name__
    if library == "bitsandbytes" and name == "Params4bit":
        return f"{tensor.quant_type}-{tensor.blocksize}" if tensor.bnb_quantized else ""
    if library == "bitsandbytes" and name == "Int8Params":
        return "int8-row" if dtype_name(tensor.dtype) == "int8" else ""
    if library == "torchao":
        return _of_torchao(tensor, name)
    return _of_engine(tensor, name) if library == "transformer_engine" else ""


def _of_torchao(tensor: Any, name: str) -> str:
    if name == "NF4Tensor":
        return f"nf4-{tensor.block_size}"
    if name == "NVFP4Tensor":
        return "nvfp4"
    if name == "MXTensor":
        element = _element(tensor.elem_dtype)
        return f"mx{element}" if tensor.block_size == 32 else f"mx{element}-{tensor.block_size}"
    if name.startswith("Int4"):
        return "int4-" + "x".join(str(size) for size in tensor.block_size if size != 1)
    if name in ("Float8Tensor", "Int8Tensor"):
        element, shape = _element(tensor.qdata.dtype), list(tensor.shape)
        block = list(tensor.block_size or shape)
        if block == shape and len(shape) != 1:
            return f"{element}-tensor"
        if block[-1] == shape[-1] and set(block[:-1]) <= {1}:
            return f"{element}-row"
        return f"{element}-" + "x".join(map(str, block[-2:]))
    return ""


def _element(dtype: Any) -> str:
    return _ELEMENTS.get(dtype_name(dtype), dtype_name(dtype))


def _of_engine(tensor: Any, name: str) -> str:
    """Name TransformerEngine's tensors, also those that it stores in another class of the same prefix."""
    if name.startswith("Float8Blockwise"):
        return "fp8-128x128" if getattr(tensor, "_is_2D_scaled", True) else "fp8-1x128"
    known = {"Float8": "fp8-tensor", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
    return next((word for prefix, word in known.items() if name.startswith(prefix)), "")
