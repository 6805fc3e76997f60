"""Reading the document that `--json` writes: a file of anybody's."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.results import SCHEMA, Results

_MOST_BYTES = 64 << 20
_FIX = "mlx-audit run FAMILY --json FILE writes one"


class ResultsError(MlxAuditError):
    """A results file is damaged, too large, or of another format version."""


def load_results(path: Path) -> Results:
    """Read a results file and check its form.

    Raises:
        ResultsError: no readable file, more than 64 MiB, no JSON, or not of this schema.
    """
    try:
        if not path.is_file():
            raise ResultsError("there is no such results file", where=str(path), fix=_FIX)
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ResultsError(
                "the results file is too large", where=str(path), found=size, allowed=f"{_MOST_BYTES} bytes"
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(
            "the results file cannot be read", where=str(path), found=error, fix=_FIX
        ) from error
    found = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if found != SCHEMA:
        raise ResultsError("another format", where=str(path), found=found, allowed=SCHEMA, fix=_FIX)
    try:
        return Results.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ResultsError(
            "the results file does not have the form of its schema",
            where=f"{path}: {place}",
            found=first["msg"],
            fix=_FIX,
        ) from error
