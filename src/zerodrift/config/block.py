"""The base of every block of keys: pydantic's model with zerodrift's errors.

pydantic's validation errors become problems of our own: the key, the requirement, the value. `tree` does so
for configs and dicts, and the constructors of the blocks for their arguments.

Invariant: a constructor refuses what `load` refuses, in the same words, and no message is in pydantic's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from zerodrift import dtypes
from zerodrift.config import fields
from zerodrift.config.plain_tree import join, shown
from zerodrift.errors import ConfigError, Problems, did_you_mean


class Block(BaseModel):
    """A block of keys: unknown keys are errors, fields keep their docstrings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True
    )

    if not TYPE_CHECKING:  # type checkers take the fields for the arguments

        def __init__(self, /, *values, **given) -> None:
            name = type(self).__name__
            if values:
                raise ConfigError(name, "must get its fields by name", got=f"{len(values)} without")
            problems = Problems()
            try:
                super().__init__(**given)
            except ValidationError as error:
                add_errors(problems, error, given, type(self))
            problems.raise_as(ConfigError, name)
            self.check(problems)
            problems.raise_as(ConfigError)

        # Nested blocks are validated with the outer one, so that their errors have the whole path.
        __init__.__pydantic_base_init__ = True

        def __setattr__(self, name, value) -> None:
            if name in type(self).model_fields:
                where = f"{type(self).__name__}.{name}"
                must = "must be given when it is made"
                raise ConfigError(where, must, got="an assignment", do="Make another one.")
            super().__setattr__(name, value)

    def check(self, problems: Problems) -> None:
        """Check the conditions that types cannot express, for a block that is constructed alone."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Return the written fields."""
        return (
            (name, getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set
        )


Steps = tuple[str | int, ...]

_MISSING = object()


def add_errors(
    problems: Problems,
    error: ValidationError,
    given: Mapping[str, Any],
    root: type[BaseModel],
    written: Callable[[Steps], str] | None = None,
    doubtful: Collection[str] = (),
    remedies: Mapping[str, str] | None = None,
    free: str = "a block of arguments",
) -> None:
    """Add one problem for each key of `given` that pydantic found wrong with a block of class `root`.

    `written` spells a path as the user wrote it. A missing key in a `doubtful` block is not reported: the
    block has an unknown key, probably a misspelling. `remedies` maps paths to advice about values that are
    not accepted. `free` describes a block of names that the schema does not know.
    """
    lines = error.errors(include_url=False, include_context=False, include_input=False)
    wrong = list(dict.fromkeys(_located(given, line["loc"], line["type"]) for line in lines))
    around = {steps[:length] for steps in wrong for length in range(len(steps))}
    for steps in wrong:
        if steps in around:  # a key says more than its block
            continue
        value, path = _value_at(given, steps), (written or name_of)(steps)
        kind = fields.kind_at(steps, root)
        if value is _MISSING:
            # A value that could not be read at all has its problem already.
            if name_of(steps[:-1]) not in doubtful and all(problem.where != path for problem in problems):
                docs = {key.path: key.doc for key in fields.every_key(root)}
                do = docs[".".join(map(str, steps))]
                problems.add(path, f"must be given: {fields.admits(kind)}", do=do)
        elif kind is None:
            block = fields.block_of(fields.kind_at(steps[:-1], root))
            assert block is not None, "only a block refuses a key"
            do = did_you_mean(str(steps[-1]), block.model_fields)
            problems.add(path, f"must be a field of `{block.__name__}`", do=do)
        else:
            generic = "".join("[]" if isinstance(step, int) else f".{step}" for step in steps)[1:]
            must = fields.must(kind, value).replace("a block of arguments", free)
            do = (remedies or {}).get(generic) or _remedy(kind, value)
            problems.add(path, must, got=shown(value), do=do)


def name_of(steps: Steps) -> str:
    """Return a path as the schema and the table spell it."""
    name = ""
    for step in steps:
        name = join(name, step)
    return name


def _located(given: Mapping[str, Any], location: Iterable[str | int], error: str) -> Steps:
    """Return pydantic's location of an error without the names of the alternatives that pydantic tried."""
    *_, last = location = tuple(location)
    steps: list[str | int] = []
    value: Any = given
    for step in location:
        inside_dict = isinstance(value, Mapping) and step in value
        inside_list = isinstance(value, (list, tuple)) and isinstance(step, int) and step < len(value)
        if inside_dict or inside_list:
            steps.append(step)
            value = value[step]
    return (*steps, last) if error == "missing" else tuple(steps)


def _value_at(given: Mapping[str, Any], steps: Steps) -> Any:
    value: Any = given
    for step in steps:
        if isinstance(value, Mapping) and step not in value:
            return _MISSING
        value = value[step]
    return value


def _remedy(kind: Any, value: Any) -> str:
    admitted, block = fields.admits(kind), fields.block_of(kind)
    if not isinstance(value, str):
        if admitted.startswith("a list") and not isinstance(value, (list, dict)):
            return "Write a list, even for one item."
        is_other = block is not None and isinstance(value, BaseModel)
        return f"Write `{block.__name__}(...)`, or a dict." if block is not None and is_other else ""
    if value == "auto":
        return '"auto" has no meaning here: write the value, or leave the key out.'
    if fields.item_of(kind) is not None:
        return f"Write `[{json.dumps(value)}]`."
    if "true" in admitted:
        word = next((meant for meant, spellings in _FLAGS.items() if value.lower() in spellings), "")
        return f"Write {word} without quotes." if word else ""
    if "number" in admitted or admitted[:1].isdigit():
        with contextlib.suppress(ValueError):
            float(value)
            return "Write it without quotes."
        return ""
    return did_you_mean(value, [*fields.choices(kind), *dtypes.spellings(fields.dtypes(kind))])


_FLAGS = {"true": ("yes", "on", "1", "true"), "false": ("no", "off", "0", "false")}
