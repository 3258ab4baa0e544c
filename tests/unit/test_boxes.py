"""Boxes against torch's own operations: any slice of a rearranged tensor has the right elements."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from zerodrift.weights.boxes import Layout, NoStridesError, concatenate, within


def read(layout: Layout, sources: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Return the elements of a range by boxes alone; -1 for a missing one."""
    out = torch.full((math.prod(layout.shape),), -1)
    count = 0
    for box in within(layout.boxes(), start, stop):
        box.of_target(out).copy_(box.of_source(sources[box.number].reshape(-1)))
        count += box.numel
    assert count == stop - start
    return out


def agree(layout: Layout, sources: Sequence[torch.Tensor], want: torch.Tensor, seed: int) -> None:
    assert layout.shape == tuple(want.shape)
    flat, chance = want.reshape(-1), random.Random(seed)
    ranges = [sorted(chance.choices(range(flat.numel() + 1), k=2)) for _ in range(12)]
    for start, stop in ([0, flat.numel()], *ranges):
        out = read(layout, sources, start, stop)
        assert torch.equal(out[start:stop], flat[start:stop])
        assert bool((out[:start] == -1).all()) and bool((out[stop:] == -1).all())


def fills(layout: Layout, sources: Sequence[torch.Tensor], want: torch.Tensor, step: int) -> None:
    """Write each source by itself, in runs of `step` elements, and check the target."""
    built = torch.full((want.numel(),), -1)
    for number, source in enumerate(sources):
        flat = source.reshape(-1)
        boxes = [box.reversed() for box in layout.boxes() if box.number == number]
        for start in range(0, flat.numel(), step):
            values = flat[start : start + step].clone()
            for box in within(boxes, start, start + values.numel()):
                place = box.of_source(built)
                assert bool((place == -1).all()), "each element once"
                place.copy_(box.of_target(values, start))
    assert torch.equal(built, want.reshape(-1))


@pytest.mark.parametrize("seed", range(60))
def test_what_transformers_does_to_weights_is_boxes(seed: int) -> None:
    chance = random.Random(seed)
    experts, rows, columns = chance.randint(1, 4), chance.choice([2, 4, 8]), chance.choice([2, 4, 6])
    sources = [torch.arange(rows * columns).view(rows, columns) + 1000 * n for n in range(2 * experts)]
    layouts = [Layout.of(n, (rows, columns)) for n in range(2 * experts)]
    stacked = [torch.stack(sources[:experts]), torch.stack(sources[experts:])]
    ours = [concatenate([x.unsqueeze(0) for x in part], 0) for part in (layouts[:experts], layouts[experts:])]
    joined, layout = torch.cat(stacked, 1), concatenate(ours, 1)
    agree(layout, sources, joined, seed)
    agree(layout.permute((0, 2, 1)), sources, joined.transpose(1, 2), seed)
    agree(layout.narrow(1, 1, rows), sources, joined.narrow(1, 1, rows), seed)
    agree(layout.narrow(0, experts - 1, 1), sources, joined.narrow(0, experts - 1, 1), seed)
    agree(layout.reshape((experts * 2 * rows, columns)), sources, joined.reshape(-1, columns), seed)
    # Interleaved gate and up, and the order of rows that rotary embeddings want.
    mixed = joined.reshape(experts, rows, 2, columns).transpose(1, 2).reshape(joined.shape)
    moved = layout.reshape((experts, rows, 2, columns)).permute((0, 2, 1, 3)).reshape(layout.shape)
    agree(moved, sources, mixed, seed)
    agree(moved.narrow(1, 1, rows), sources, mixed.narrow(1, 1, rows), seed)
    for step in (1, 7, rows * columns):
        fills(layout, sources, joined, step)
        fills(layout.permute((0, 2, 1)), sources, joined.transpose(1, 2), step)
        fills(moved, sources, mixed, step)
    half = rows // 2
    turned = sources[0].view(half, 2, columns).transpose(0, 1).reshape(rows, columns)
    rope = layouts[0].reshape((half, 2, columns)).permute((1, 0, 2)).reshape((rows, columns))
    agree(rope, sources, turned, seed)
    fills(rope, sources[:1], turned, 3)
    agree(rope.narrow(0, 1, rows - 1), sources, turned.narrow(0, 1, rows - 1), seed)


def test_empty_tensors_and_scalars() -> None:
    assert Layout.of(0, (0, 4)).boxes() == ()
    (scalar,) = Layout.of(0, ()).boxes()
    assert scalar.numel == 1 and list(within([scalar], 0, 1)) == [scalar]
    assert list(within([scalar], 1, 1)) == []


def test_a_view_that_strides_cannot_say_is_refused() -> None:
    joined = concatenate([Layout.of(0, (3,)), Layout.of(1, (3,))], 0)
    with pytest.raises(NoStridesError):
        joined.reshape((3, 2)).permute((1, 0))
