"""Describe by offsets and strides where the elements of one tensor lie in other tensors.

A parameter that is stored as it is has one `Box`; one of stacked experts has a box for each tensor in the
files. Reading and writing use the same boxes: the target is a parameter, the source a tensor of a file.

Invariant: cut to any range of the target, boxes give every element of the range once and no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

Shape: TypeAlias = "tuple[int, ...]"


class NotAMoveError(ValueError):
    """An operation that does more than move elements, or a move that strides cannot describe."""


@dataclass(frozen=True, slots=True)
class BoxAxis:
    """Equal steps through the flat target and the flat source. Steps are in elements."""

    size: int
    target: int
    source: int


@dataclass(frozen=True, slots=True)
class Box:
    """`target[start + sum(i * axis.target)] = source[origin + sum(i * axis.source)]`, all flat."""

    number: int
    """Index of the source."""
    start: int
    origin: int
    axes: tuple[BoxAxis, ...]
    """Largest step through the target first; each step is larger than the span of the later axes."""

    @property
    def numel(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def last(self) -> int:
        return self.start + sum((axis.size - 1) * axis.target for axis in self.axes)

    @property
    def span(self) -> int:
        return 1 + sum((axis.size - 1) * axis.source for axis in self.axes)

    @property
    def is_run(self) -> bool:
        """True if both sides are contiguous."""
        return len(self.axes) <= 1 and all(axis.target == axis.source == 1 for axis in self.axes)

    def of_target(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """View the box in flat memory that begins at element `first` of the target."""
        sizes, strides = [axis.size for axis in self.axes], [axis.target for axis in self.axes]
        return flat.as_strided(sizes, strides, flat.storage_offset() + self.start - first)

    def of_source(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """View the box in flat memory of the source, in the same shape."""
        sizes, strides = [axis.size for axis in self.axes], [axis.source for axis in self.axes]
        return flat.as_strided(sizes, strides, flat.storage_offset() + self.origin - first)

    def reversed(self) -> Box:
        """Exchange target and source."""
        axes = tuple(BoxAxis(axis.size, axis.source, axis.target) for axis in self.axes)
        return simplified(Box(0, self.origin, self.start, axes))

    def at(self, axis: int, first: int, count: int) -> Box:
        """Narrow one axis to `count` steps from step `first` on."""
        old = self.axes[axis]
        axes = (*self.axes[:axis], replace(old, size=count), *self.axes[axis + 1 :])
        return Box(self.number, self.start + first * old.target, self.origin + first * old.source, axes)


def simplified(box: Box) -> Box:
    """Return the same elements with the fewest axes."""
    merged: list[BoxAxis] = []
    for axis in sorted((a for a in box.axes if a.size != 1), key=lambda a: -a.target):
        outer = merged[-1] if merged else None
        if outer and outer.target == axis.target * axis.size and outer.source == axis.source * axis.size:
            merged[-1] = BoxAxis(outer.size * axis.size, axis.target, axis.source)
        else:
            merged.append(axis)
    return Box(box.number, box.start, box.origin, tuple(merged))


def within(boxes: Sequence[Box], start: int, stop: int) -> Iterator[Box]:
    """Cut boxes to elements `[start, stop)` of the flat target."""
    for box in boxes:
        yield from _cut(box, start, stop)


def _cut(box: Box, start: int, stop: int) -> Iterator[Box]:
    first, last = box.start, box.last
    if not box.numel or last < start or first >= stop:
        return
    if start <= first and last < stop:
        yield box
        return
    # A box without an axis of two steps is one element, and was inside or outside above.
    number = next(n for n, axis in enumerate(box.axes) if axis.size > 1)
    step, size = box.axes[number].target, box.axes[number].size
    span = last - first - (size - 1) * step
    """Distance from the first to the last element of one step."""
    whole_from = min(size, max(0, -(-(start - first) // step)))
    whole_to = min(size, max(whole_from, (stop - 1 - span - first) // step + 1))
    for index in range(max(0, (start - first - span + step - 1) // step), whole_from):
        yield from _cut(box.at(number, index, 1), start, stop)
    if whole_to > whole_from:
        yield box.at(number, whole_from, whole_to - whole_from)
    for index in range(whole_to, min(size, -(-(stop - first) // step))):
        yield from _cut(box.at(number, index, 1), start, stop)


@dataclass(frozen=True, slots=True)
class Layout:
    """The sources of the elements of one tensor. Every operation returns a new layout."""

    shape: Shape
    parts: tuple[Box, ...]
    """Boxes in any order. Their target is the tensor in row-major order."""

    @staticmethod
    def of(number: int, shape: Shape) -> Layout:
        whole = simplified(Box(number, 0, 0, (BoxAxis(math.prod(shape), 1, 1),)))
        return Layout(shape, (whole,) if math.prod(shape) else ())

    def boxes(self) -> tuple[Box, ...]:
        return tuple(sorted(self.parts, key=lambda box: box.start))

    def reshape(self, shape: Shape) -> Layout:
        """Return the same elements in row-major order under another shape."""
        if math.prod(shape) != math.prod(self.shape):
            raise NotAMoveError(f"{list(self.shape)} has no form {list(shape)}")
        return Layout(shape, self.parts)

    def unsqueeze(self, dim: int) -> Layout:
        return Layout((*self.shape[:dim], 1, *self.shape[dim:]), self.parts)

    def permute(self, dims: Sequence[int]) -> Layout:
        shape = tuple(self.shape[dim] for dim in dims)
        return Layout(shape, self._placed([_strides(shape)[dims.index(dim)] for dim in range(len(dims))]))

    def narrow(self, dim: int, start: int, length: int) -> Layout:
        """Return the slice `[start, start + length)` of a dimension."""
        dims = (dim, *(other for other in range(len(self.shape)) if other != dim))
        shape = (length, *(self.shape[other] for other in dims[1:]))
        first, inner = self.permute(dims), math.prod(shape[1:])
        cut = within(first.parts, start * inner, (start + length) * inner)
        parts = tuple(simplified(replace(box, start=box.start - start * inner)) for box in cut)
        return Layout(shape, parts).permute([dims.index(other) for other in range(len(dims))])

    def _placed(self, strides: Sequence[int], offset: int = 0) -> tuple[Box, ...]:
        """Return the parts in a flat target in which the dimensions have other strides."""
        if list(strides) == _strides(self.shape):
            return tuple(replace(box, start=box.start + offset) for box in self.parts)
        return tuple(_placed(box, self.shape, strides, offset) for box in self.parts)


def concatenate(layouts: Sequence[Layout], dim: int) -> Layout:
    first = layouts[0].shape
    length = sum(layout.shape[dim] for layout in layouts)
    shape = (*first[:dim], length, *first[dim + 1 :])
    strides, place = _strides(shape), 0
    parts: list[Box] = []
    for layout in layouts:
        parts += layout._placed(strides, place * strides[dim])
        place += layout.shape[dim]
    return Layout(shape, tuple(parts))


def _strides(shape: Shape) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _placed(box: Box, shape: Shape, strides: Sequence[int], offset: int) -> Box:
    base = [box.start // stride % size for size, stride in zip(shape, _strides(shape), strict=True)]
    start = offset + sum(at * stride for at, stride in zip(base, strides, strict=True))
    axes = []
    for axis in box.axes:
        for dim, step in _along(axis, shape):
            axes.append(BoxAxis(step.size, step.target * strides[dim], step.source))
            base[dim] += (step.size - 1) * step.target
    if any(at >= size for at, size in zip(base, shape, strict=True)):
        raise NotAMoveError(f"a run of elements crosses the rows of {list(shape)}")
    return simplified(Box(box.number, start, box.origin, tuple(axes)))


def _along(axis: BoxAxis, shape: Shape) -> Iterator[tuple[int, BoxAxis]]:
    """Break an axis through a flat target into axes along its dimensions, innermost first."""
    strides = _strides(shape)
    size, step, source = axis.size, axis.target, axis.source
    while size > 1:
        dim = next((d for d, stride in enumerate(strides) if stride <= step and shape[d] > 1), None)
        if dim is None or step % strides[dim]:
            raise NotAMoveError(f"a step of {step} elements is none of {list(shape)}")
        inside = step // strides[dim]
        count = min(size, max(1, shape[dim] // inside))
        if count == size or dim == 0:
            yield dim, BoxAxis(size, inside, source)
            return
        if shape[dim] % inside or size % count:
            raise NotAMoveError(f"{size} steps of {step} elements do not fill {list(shape)}")
        if count > 1:
            yield dim, BoxAxis(count, inside, source)
        size, step, source = size // count, step * count, source * count
