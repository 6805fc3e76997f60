"""What the parent of a conversion asks its child, and what it is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mlx_audit.audit.asking import NoAnswer, ask
from mlx_audit.convert.options import ConvertOptions
from mlx_audit.errors import MlxAuditError

_MOST_SECONDS = 604_800.0
"""A week: large checkpoints take as long as they take."""


class ConversionFailed(MlxAuditError):
    """The checkpoint cannot be converted, or what came out cannot be loaded."""


class Order(BaseModel):
    """One conversion.

    Attributes:
        text: SRC, for messages.
        work: What is done: `gguf` and `convert` make `made` from `source`, `load` only looks whether `source` loads.
        source: A GGUF file, or a folder that holds nothing but files of a model.
        made: The folder to make.
    """

    model_config = ConfigDict(extra="forbid")

    text: str
    work: Literal["gguf", "convert", "load"]
    source: Path
    made: Path
    options: ConvertOptions


class Answer(BaseModel):
    """What the child answers."""

    model_config = ConfigDict(extra="forbid")

    error: str | None = None
    notes: list[str] = []


def convert_in_child(order: Order) -> list[str]:
    """Do a conversion in a child process, which may crash as it likes, and return what there is to say.

    Raises:
        ConversionFailed: the child refused, or died.
    """
    try:
        line, _ = ask("mlx_audit.convert.child", order, _MOST_SECONDS, "converted")
        answer = Answer.model_validate_json(line)
    except NoAnswer as error:
        raise ConversionFailed(error.what, where=error.where, found=error.found) from error
    except ValidationError:
        raise ConversionFailed("the process gave no usable answer", where=order.text) from None
    if answer.error is not None:
        raise ConversionFailed(answer.error)
    return answer.notes
