"""The base of every block of keys: pydantic's model with zerodrift's errors.

Invariant: a constructor refuses what `load` refuses, in the same words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from zerodrift.config.validation import add_errors
from zerodrift.errors import ConfigError, Problems


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
