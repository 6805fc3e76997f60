"""The command line: one file a verb.

A verb is a module of this package whose name has no leading underscore; it defines a function of the same name with
typer annotations, which returns its exit code (None is 0). Modules are imported to print the list of verbs, so anything
heavy, mlx above all, is imported inside the function.
"""

from __future__ import annotations

import builtins
import functools
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import PurePath

import typer

from mlx_audit.cli import _console
from mlx_audit.errors import MlxAuditError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


UNUSABLE = 2
"""Exit code of usage errors, and of files that cannot be read or written."""


def verbs() -> dict[str, Callable[..., int | None]]:
    """The verbs by name, found by scanning this package."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            found[module.name] = getattr(import_module(f"{__name__}.{module.name}"), module.name)
    return found


def application() -> typer.Typer:
    """The typer application with every verb."""
    app = typer.Typer(
        name="mlx-audit",
        help="Declare and prove, per model family, that decoding may be compiled on MLX.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name, verb in verbs().items():
        app.command(name.replace("_", "-"))(_guarded(verb))
    return app


def main() -> None:
    """The console script."""
    if not _console.open_streams():
        _console.show_error(MlxAuditError("stdout is closed", fix="send it somewhere"))
        sys.exit(UNUSABLE)
    try:
        application()(prog_name="mlx-audit")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        # Such as `--help` into a full disk.
        sys.exit(_failed(error))


def _version(wanted: bool) -> None:
    if wanted:
        from mlx_audit._version import __version__

        print(f"mlx-audit {__version__}")
        raise typer.Exit


def _global_options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Declare and prove, per model family, that decoding may be compiled on MLX."""


def _guarded(verb: Callable[..., int | None]) -> Callable[..., None]:
    """The verb with its exit code made real, and its expected errors shown without a traceback."""

    @functools.wraps(verb)
    def run(*args: object, **kwargs: object) -> None:
        try:
            _require_names(kwargs)
            code = verb(*args, **kwargs)
            sys.stdout.flush()
        except MlxAuditError as error:
            _console.show_error(error)
            code = error.exit_code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except OSError as error:
            code = _failed(error)
        if code:
            raise typer.Exit(code)

    return run


def _failed(error: OSError) -> int:
    """Say in one line which file failed how, and return the exit code."""
    if isinstance(error, BrokenPipeError):
        return _console.drop_stdout()
    try:
        sys.stdout.flush()
    except OSError:
        _console.drop_stdout()  # it is stdout itself
    where = error.filename if isinstance(error.filename, str) else None
    _console.show_error(MlxAuditError(error.strerror or type(error).__name__, where=where))
    return UNUSABLE


def _require_names(values: Mapping[str, object]) -> None:
    """Refuse names that are no UTF-8: neither JSON nor a terminal can carry them."""
    for name, value in values.items():
        # Not `list`: here, that is the verb.
        for item in value if isinstance(value, builtins.list) else [value]:
            if isinstance(item, str | PurePath) and not _is_text(str(item)):
                raise MlxAuditError(
                    "the value is no UTF-8", where=name.replace("_", "-"), found=os.fsencode(str(item))
                )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
