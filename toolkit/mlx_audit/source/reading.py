"""Reading one model file: build its model, make its caches, run one step of one token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlx_audit.errors import describe
from mlx_audit.source.interpreter import Interpreter
from mlx_audit.source.machine import Exhausted
from mlx_audit.source.modules import Library, Unreadable
from mlx_audit.source.report import Consumer, SourceReport
from mlx_audit.source.stepping import OWN_CACHE, NoModel, run_model

_NOTHING: Mapping[str, Path] = {}


def read_source(file: Path, overlay: Mapping[str, Path] = _NOTHING) -> SourceReport:
    """Return who consumes the position in a model file and in what it reaches.

    The file is parsed, never imported: its code does not run, whatever it is.

    Args:
        file: A model file laid out as mlx-lm's are.
        overlay: Files to read in place of modules, by full name such as `mlx_lm.models.rope_utils`.
    """
    library = Library(overlay)
    machine = Interpreter(library)
    unreadable = ""
    try:
        run_model(machine, library.main(file))
    except (Unreadable, NoModel) as problem:
        unreadable = str(problem)
    except Exhausted:
        unreadable = f"{file}:1: too large to follow to its end"
    except RecursionError:
        unreadable = f"{file}:1: calls nest too deeply to be followed"
    except (
        Exception
    ) as error:  # a reader must survive any file, and never call one clean that it did not read
        unreadable = f"{file}:1: internal error of mlx-audit, please report it: {describe(error)}"
    return SourceReport(
        file,
        _told_once(machine.consumers()),
        unreadable or machine.stopped,
        (*library.problems, *machine.notes),
    )


def _told_once(consumers: tuple[Consumer, ...]) -> tuple[Consumer, ...]:
    """Leave out reads of numbers that a layer keeps, not a cache: what keeps them is told where they are assigned."""
    if any(consumer.kind in ("own cache", OWN_CACHE) for consumer in consumers):
        return consumers
    return tuple(consumer for consumer in consumers if consumer.code != "SRC006")
