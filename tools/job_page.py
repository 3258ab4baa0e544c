"""Write the reference page of job files, `docs/job.md`, from the docstrings and defaults of `job.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from zerodrift.config import fields
from zerodrift.train.job import Job

_INTRO = """\
<!-- Generated from `zerodrift/train/job.py` by `make docs`. Edit that file. -->

# Which keys does a job have?

This page lists every key of a job file for `zerodrift train`; [train.md](train.md) shows how to use them.
Precision, sharding, optimizer, schedule and batch sizes are keys of the engine's [config](config.md), under
`config`. Set any key on the command line: `--set run.steps=100 --set config.zero_optimization.stage=2`.

```yaml
model: {source: examples/qwen3-moe-tiny}
data: {train: path/to/text, block: 128}
run: {folder: runs/first, steps: 240}
config: {precision: {mode: bf16}, train_batch_size: 16, optimizer: {type: AdamW, params: {lr: 3.0e-3}}}
```

**A job file can run code.** `model.source` and `model.parts` name a function that is imported and called, and
paths may be any that you can access: [what somebody else's job may do](train.md#somebody-elses-job)."""


def render_job() -> str:
    """Return `docs/job.md`."""
    parts = [_INTRO]
    for name, block in _blocks(Job, ""):
        parts.append(f"## `{name}`" if name else "## At top level")
        doc = " ".join((block.__doc__ or "").split())
        parts += [doc] if name else []
        parts.append(_table(block))
    return "\n\n".join(parts) + "\n"


def _blocks(block: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a block and its inner blocks."""
    yield name, block
    for key, kind in fields.fields(block).items():
        inner, item = fields.block_of(kind), fields.item_of(kind)
        path = f"{name}.{key}" if name else key
        if inner is None and item is not None:
            inner, path = fields.block_of(item), f"{path}[]"
        if inner is not None:
            yield from _blocks(inner, path)


def _table(block: type[BaseModel]) -> str:
    lines = ["| Key | Allowed | Default | Meaning |", "| --- | --- | --- | --- |"]
    for (key, kind), field in zip(fields.fields(block).items(), block.model_fields.values(), strict=True):
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        default = "required" if field.is_required() else _default(value)
        admitted = fields.admits(kind).replace("a block of arguments", "a block of keys")
        text = " ".join((field.description or "").split())
        lines.append(f"| `{key}` | {admitted} | {default} | {text} |")
    return "\n".join(lines)


def _default(value: Any) -> str:
    """Return a default as a job file spells it; empty for one that is described in words."""
    if value is None or value in ("", (), {}) or isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"
