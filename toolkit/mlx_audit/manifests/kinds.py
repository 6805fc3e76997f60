"""Cache kinds and their parameters, as a manifest writes them; one small model a kind."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from mlx_audit.manifests.expressions import MAX_LENGTH, constant, parse
from mlx_audit.manifests.syntax import Expression, ExpressionError


class StrictModel(BaseModel):
    """A model without unknown keys, without conversions, and without changes after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


def _condition(value: Any) -> Expression:
    if isinstance(value, Expression):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("expression_type", "not an expression", {"allowed": "a quoted expression"})
    return _parsed(value)


def _parameter(value: Any) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise PydanticCustomError(
                "parameter_range", "the number is negative", {"allowed": "an integer, 0 or more"}
            )
        return constant(value)
    if not isinstance(value, str):
        raise PydanticCustomError(
            "expression_type",
            "neither a number nor an expression",
            {"allowed": "an integer or an expression"},
        )
    return _parsed(value)


def _parsed(text: str) -> Expression:
    try:
        return parse(text)
    except ExpressionError as error:
        details = {"column": error.column, "found": error.found, "allowed": error.allowed, "fix": error.fix}
        # Braces would be read as a template by pydantic.
        raise PydanticCustomError("expression", "{what}", {"what": error.what, **details}) from None


Condition = Annotated[
    Expression,
    PlainValidator(_condition),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_LENGTH}),
]
"""An expression that must come out true or false."""

Parameter = Annotated[
    Expression,
    PlainValidator(_parameter),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "minLength": 1, "maxLength": MAX_LENGTH},
            ]
        }
    ),
]
"""A number, or an expression that must come out as one."""


class Entry(StrictModel):
    """What all cache kinds share."""

    parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the kind's parameters, in the order in which they are shown."""

    when: Condition | None = Field(
        default=None,
        description="Condition over the arguments (and `i`, the layer's index); without it the rule always holds.",
    )
    cache: str

    def values(self) -> dict[str, Expression]:
        """The parameters' expressions by name."""
        return {name: getattr(self, name) for name in self.parameters}


class Linear(Entry):
    """Keys and values of every token; mlx-lm's KVCache."""

    cache: Literal["linear"]


class Rotating(Entry):
    """Keys and values of the last tokens, in a ring; mlx-lm's RotatingKVCache."""

    parameters = ("window", "keep")

    cache: Literal["rotating"]
    window: Parameter = Field(description="Tokens that the ring holds; RotatingKVCache's max_size.")
    keep: Parameter = Field(
        default=constant(0),
        json_schema_extra={"default": 0},
        description="Tokens at the start that are never overwritten; RotatingKVCache's keep.",
    )


class Arrays(Entry):
    """State of fixed size, such as a convolution's and a recurrence's; mlx-lm's ArraysCache."""

    parameters = ("slots",)

    cache: Literal["arrays"]
    slots: Parameter = Field(description="Arrays that the entry holds; ArraysCache's size.")


class Chunked(Entry):
    """Keys and values of the current chunk; mlx-lm's ChunkedKVCache."""

    parameters = ("chunk",)

    cache: Literal["chunked"]
    chunk: Parameter = Field(description="Tokens in a chunk; ChunkedKVCache's chunk_size.")


class Quantized(Entry):
    """Keys and values of every token, quantized in groups; mlx-lm's QuantizedKVCache."""

    parameters = ("bits", "group_size")

    cache: Literal["quantized"]
    bits: Parameter = Field(description="Bits a value; QuantizedKVCache's bits.")
    group_size: Parameter = Field(
        description="Values that share a scale and a bias; QuantizedKVCache's group_size."
    )


class Composite(Entry):
    """Several caches in one entry; mlx-lm's CacheList."""

    cache: Literal["composite"]
    of: list[Rule] = Field(
        min_length=1, max_length=16, description="The parts, in the order in which the layer uses them."
    )

    @model_validator(mode="after")
    def _plain_parts(self) -> Self:
        for part in self.of:
            if part.when is not None or part.cache == "none":
                found = "`when`" if part.when is not None else "none"
                raise PydanticCustomError(
                    "part", "a part of a composite is conditional or empty", {"found": found, "key": "of"}
                )
        return self


class Nothing(Entry):
    """A layer that keeps no cache: it emits no entry."""

    cache: Literal["none"]


Rule = Annotated[
    Linear | Rotating | Arrays | Chunked | Quantized | Composite | Nothing,
    Field(discriminator="cache"),
]
"""One way in which a layer keeps its cache."""

KINDS: dict[str, type[Entry]] = {
    "linear": Linear,
    "rotating": Rotating,
    "arrays": Arrays,
    "chunked": Chunked,
    "quantized": Quantized,
    "composite": Composite,
    "none": Nothing,
}
"""The model of each kind."""

Composite.model_rebuild()
__all__ = ["KINDS", "Condition", "Entry", "Parameter", "Rule", "StrictModel"]
