"""Where the elements of a tensor lie in the tensors of files: pure arithmetic on offsets and strides.

A `Box` says that some elements of a target are some elements of one source, as two strided views of equal
shape. A parameter that is stored as it is has one box; an experts' parameter that the files hold expert by
expert has one for each of their tensors. Reading and writing use the same boxes: the target is a parameter,
the source a tensor of a file. `conversions.py` finds them, `reader.py` and `writer.py` copy along them.

Invariant: cut to any range of the target, boxes give every element of the range once and no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

Shape: TypeAlias = "tuple[int, ...]"


class NoStridesError(ValueError):
    """A view of a tensor that strides cannot describe."""


@dataclass(frozen=True, slots=True)
class BoxAxis:
    """A run of equal steps through the target and the source at once."""

    size: int
    target: int
    """Elements from one to the next in the flat target."""
    source: int
    """And in the flat source."""


@dataclass(frozen=True, slots=True)
class Box:
    """`target[start + sum(i * axis.target)] = source[origin + sum(i * axis.source)]`, all flat."""

    number: int
    """Which source."""
    start: int
    origin: int
    axes: tuple[BoxAxis, ...]
    """Largest step through the target first; each step is beyond the span of those that follow."""

    @property
    def numel(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def last(self) -> int:
        """The last element of the target."""
        return self.start + sum((axis.size - 1) * axis.target for axis in self.axes)

    def of_target(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The view of its elements in flat memory that begins at element `first` of the target."""
        return flat.as_strided(
            [axis.size for axis in self.axes],
            [axis.target for axis in self.axes],
            flat.storage_offset() + self.start - first,
        )

    def of_source(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The same of the source, in the same shape."""
        return flat.as_strided(
            [axis.size for axis in self.axes],
            [axis.source for axis in self.axes],
            flat.storage_offset() + self.origin - first,
        )

    @property
    def span(self) -> int:
        """Elements of the source from its first to its last."""
        return 1 + sum((axis.size - 1) * axis.source for axis in self.axes)

    def reversed(self) -> Box:
        """The same with the sides changed."""
        axes = tuple(BoxAxis(axis.size, axis.source, axis.target) for axis in self.axes)
        return simplified(Box(0, self.origin, self.start, axes))

    @property
    def is_run(self) -> bool:
        """Whether both sides are contiguous."""
        return all(axis.target == axis.source == 1 for axis in self.axes) and len(self.axes) <= 1

    def at(self, axis: int, first: int, count: int) -> Box:
        """The box with `count` steps of one axis, from step `first` on."""
        taken = self.axes[axis]
        axes = (*self.axes[:axis], replace(taken, size=count), *self.axes[axis + 1 :])
        start = self.start + first * taken.target
        return Box(self.number, start, self.origin + first * taken.source, axes)


def simplified(box: Box) -> Box:
    """The same elements with the fewest axes."""
    merged: list[BoxAxis] = []
    for axis in sorted((a for a in box.axes if a.size != 1), key=lambda a: -a.target):
        outer = merged[-1] if merged else None
        if outer and outer.target == axis.target * axis.size and outer.source == axis.source * axis.size:
            merged[-1] = BoxAxis(outer.size * axis.size, axis.target, axis.source)
        else:
            merged.append(axis)
    return Box(box.number, box.start, box.origin, tuple(merged))


def within(boxes: Sequence[Box], start: int, stop: int) -> Iterator[Box]:
    """The boxes of the elements `start` to `stop` of the flat target."""
    for box in boxes:
        yield from _cut(box, start, stop)


def _cut(box: Box, start: int, stop: int) -> Iterator[Box]:
    first, last = box.start, box.last
    if not box.numel or last < start or first >= stop:
        return
    if start <= first and last < stop:
        yield box
        return
    # The step is larger than 0 and there are two of it, or the box would be inside or outside as a whole.
    number = next(n for n, axis in enumerate(box.axes) if axis.size > 1)
    step = box.axes[number].target
    span = last - first - (box.axes[number].size - 1) * step
    """How far the inner axes reach beyond the start of a step."""
    size = box.axes[number].size
    whole_from = min(size, max(0, -(-(start - first) // step)))
    whole_to = min(size, max(whole_from, (stop - 1 - span - first) // step + 1))
    for index in range(max(0, (start - first - span + step - 1) // step), whole_from):
        yield from _cut(box.at(number, index, 1), start, stop)
    if whole_to > whole_from:
        yield box.at(number, whole_from, whole_to - whole_from)
    for index in range(whole_to, min(size, -(-(stop - first) // step))):
        yield from _cut(box.at(number, index, 1), start, stop)


# --- a shape around boxes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """An axis of a patch: a run of equal steps along one dimension of the shape."""

    size: int
    dim: int
    step: int
    source: int


@dataclass(frozen=True, slots=True)
class _Patch:
    """A box by dimensions: where it begins in each, and its axes."""

    number: int
    origin: int
    base: Shape
    steps: tuple[_Step, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A shape whose elements are those of sources. Immutable: every operation gives a new one."""

    shape: Shape
    patches: tuple[_Patch, ...]

    @staticmethod
    def of(number: int, shape: Shape) -> Layout:
        """A source as it is."""
        steps, stride = [], 1
        for dim in reversed(range(len(shape))):
            steps.append(_Step(shape[dim], dim, 1, stride))
            stride *= shape[dim]
        patch = _Patch(number, 0, (0,) * len(shape), tuple(reversed(steps)))
        return Layout(shape, (patch,) if math.prod(shape) else ())

    def boxes(self) -> tuple[Box, ...]:
        """Flat, in the order of the target."""
        strides = _strides(self.shape)
        boxes = []
        for patch in self.patches:
            axes = tuple(BoxAxis(s.size, s.step * strides[s.dim], s.source) for s in patch.steps)
            start = sum(base * stride for base, stride in zip(patch.base, strides, strict=True))
            boxes.append(simplified(Box(patch.number, start, patch.origin, axes)))
        return tuple(sorted(boxes, key=lambda box: box.start))

    def permute(self, dims: Sequence[int]) -> Layout:
        place = {old: new for new, old in enumerate(dims)}
        return Layout(
            tuple(self.shape[dim] for dim in dims),
            tuple(
                replace(
                    patch,
                    base=tuple(patch.base[dim] for dim in dims),
                    steps=tuple(replace(step, dim=place[step.dim]) for step in patch.steps),
                )
                for patch in self.patches
            ),
        )

    def narrow(self, dim: int, start: int, length: int) -> Layout:
        """The slice `start` to `start + length` of a dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        kept = [cut for patch in self.patches for cut in _clip(patch, dim, start, start + length)]
        return Layout(shape, tuple(_moved(patch, dim, -start) for patch in kept))

    def unsqueeze(self, dim: int) -> Layout:
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        patches = [
            replace(
                patch,
                base=(*patch.base[:dim], 0, *patch.base[dim:]),
                steps=tuple(replace(s, dim=s.dim + (s.dim >= dim)) for s in patch.steps),
            )
            for patch in self.patches
        ]
        return Layout(shape, tuple(patches))

    def reshape(self, shape: Shape) -> Layout:
        """The same elements in row-major order under another shape."""
        if math.prod(shape) != math.prod(self.shape):
            raise NoStridesError(f"{list(self.shape)} has no form {list(shape)}")
        if not self.patches:
            return Layout(shape, ())
        return Layout(shape, tuple(_spread(patch, self.shape, shape) for patch in self.patches))


def concatenate(layouts: Sequence[Layout], dim: int) -> Layout:
    patches, place = [], 0
    for layout in layouts:
        patches += [_moved(patch, dim, place) for patch in layout.patches]
        place += layout.shape[dim]
    first = layouts[0].shape
    return Layout((*first[:dim], place, *first[dim + 1 :]), tuple(patches))


def _strides(shape: Shape) -> list[int]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return strides[::-1]


def _moved(patch: _Patch, dim: int, by: int) -> _Patch:
    return replace(patch, base=(*patch.base[:dim], patch.base[dim] + by, *patch.base[dim + 1 :]))


def _clip(patch: _Patch, dim: int, start: int, stop: int) -> Iterator[_Patch]:
    """The part of a patch between two places of one dimension."""
    along = [n for n, step in enumerate(patch.steps) if step.dim == dim and step.size > 1]
    first = patch.base[dim]
    last = first + sum((patch.steps[n].size - 1) * patch.steps[n].step for n in along)
    if last < start or first >= stop:
        return
    if start <= first and last < stop:
        yield patch
        return
    outer = max(along, key=lambda n: patch.steps[n].step)
    step = patch.steps[outer]
    if len(along) == 1:
        low = max(0, -(-(start - first) // step.step))
        high = min(step.size, -(-(stop - first) // step.step))
        if high > low:
            yield _narrowed(patch, outer, low, high - low)
        return
    for index in range(step.size):
        yield from _clip(_narrowed(patch, outer, index, 1), dim, start, stop)


def _narrowed(patch: _Patch, number: int, first: int, count: int) -> _Patch:
    step = patch.steps[number]
    moved = _moved(patch, step.dim, first * step.step)
    steps = (*patch.steps[:number], replace(step, size=count), *patch.steps[number + 1 :])
    return replace(moved, origin=patch.origin + first * step.source, steps=steps)


def _spread(patch: _Patch, old: Shape, new: Shape) -> _Patch:
    """A patch by the dimensions of another shape: through its flat form, step by step."""
    flat, strides = _strides(old), _strides(new)
    start = sum(base * stride for base, stride in zip(patch.base, flat, strict=True))
    base = tuple((start // stride) % size for size, stride in zip(new, strides, strict=True))
    steps: list[_Step] = []
    for step in patch.steps:
        steps += _broken(step.size, step.step * flat[step.dim], step.source, new)
    room = list(base)
    for step in steps:
        room[step.dim] += (step.size - 1) * step.step
    if any(reached >= size for reached, size in zip(room, new, strict=True)):
        raise NoStridesError(f"{list(old)} as {list(new)} cuts through what was put together")
    return _Patch(patch.number, patch.origin, base, tuple(steps))


def _broken(size: int, step: int, source: int, shape: Shape) -> Iterator[_Step]:
    """A flat axis as steps along dimensions, innermost last."""
    strides = _strides(shape)
    steps: list[_Step] = []
    while size > 1:
        fits = (d for d, stride in enumerate(strides) if stride <= step and shape[d] > 1)
        dim = next(fits, None)
        if dim is None or step % strides[dim]:
            raise NoStridesError(f"a step of {step} elements is none of {list(shape)}")
        inside = step // strides[dim]
        count = min(size, max(1, shape[dim] // inside))
        if count == size or dim == 0:
            steps.append(_Step(size, dim, inside, source))
            break
        if shape[dim] % inside or size % count:
            raise NoStridesError(f"{size} steps of {step} elements do not fill {list(shape)}")
        if count > 1:
            steps.append(_Step(count, dim, inside, source))
        size, step, source = size // count, step * count, source * count
    yield from reversed(steps)
