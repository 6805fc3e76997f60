"""`mlx-audit report`: results, or the committed records, in the formats that people and their tools read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_audit.cli import _choices, _console, _files
from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from mlx_audit.evidence.results import Results

Inputs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RESULTS...]", help="What run --json wrote; without any, the committed records."),
]
Family = Annotated[list[str] | None, typer.Option("--family", help="Only these families; commas allowed.")]
Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="One page that opens without a network.")
]
Markdown = Annotated[
    str | None, typer.Option("--markdown", metavar="FILE", help="A job summary; - is stdout, the default.")
]
Junit = Annotated[str | None, typer.Option("--junit", metavar="FILE", help="JUnit XML, for test reports.")]
Sarif = Annotated[str | None, typer.Option("--sarif", metavar="FILE", help="SARIF 2.1.0, for code scanning.")]

BEGINNINGS = {"html": b"<!", "markdown": b"# mlx-audit", "junit": b"<?xml", "sarif": b"{"}
"""How a file of each format begins; one that begins otherwise is somebody else's, and is not written over."""

NOTHING = 3
"""Exit code where nothing was collected."""


def report(
    results: Inputs = None,
    html: Html = None,
    markdown: Markdown = None,
    junit: Junit = None,
    sarif: Sarif = None,
    family: Family = None,
) -> int:
    """Write reports; exit 0 when written, whatever they say, 2 bad input, 3 nothing collected: gate is the judge."""
    from mlx_audit.reports.recorded import recorded_documents

    wanted = {"html": html, "markdown": markdown, "junit": junit, "sarif": sarif}
    outputs = {name: file for name, file in wanted.items() if file is not None} or {"markdown": "-"}
    files = _distinct(results or [])
    documents, read = _from_results(files) if files else recorded_documents()
    _require_writable(outputs, read)
    if family:
        documents = _only(documents, family)
    # All are made before one is written: a bad one must not leave the others half new.
    texts = {name: import_module(f"mlx_audit.reports.{name}").render(documents) for name in outputs}
    for name, text in texts.items():
        _write(outputs[name], text)
    if any(document.results for document in documents):
        return 0
    _console.note("nothing was collected")
    return NOTHING


def _distinct(files: Sequence[Path]) -> list[Path]:
    from mlx_audit.manifests.files import real

    seen: set[Path] = set()
    for file in files:
        if real(file) in seen:
            raise MlxAuditError("the same results twice", where=str(file), fix="name each file once")
        seen.add(real(file))
    return list(files)


def _from_results(files: Iterable[Path]) -> tuple[list[Results], list[Path]]:
    from mlx_audit.evidence.results_file import load_results

    return [load_results(file) for file in files], list(files)


def _only(documents: Iterable[Results], families: Iterable[str]) -> list[Results]:
    found = list(documents)
    known = sorted({result.family for document in found for result in document.results})
    names = _choices.each_of("--family", families, known) if known else []
    return [
        document.model_copy(update={"results": [r for r in document.results if r.family in names]})
        for document in found
    ]


def _require_writable(outputs: dict[str, str], read: Sequence[Path]) -> None:
    """Refuse, before anything is written, what cannot be written or would be lost."""
    repeated = [f"--{name} -" for name, file in outputs.items() if file == "-"]
    if len(repeated) > 1:
        raise MlxAuditError(
            "stdout takes one report", found=" ".join(repeated), fix="name files for the others"
        )
    places: dict[Path, str] = {}
    for name, file in outputs.items():
        if file == "-":
            continue
        place = _files.report(f"--{name}", file, read, BEGINNINGS[name]).resolve()
        if place in places and place.parent != Path("/dev"):
            raise MlxAuditError(
                "two reports in one file",
                where=f"--{name} {file}",
                found=f"--{places[place]} is written there",
            )
        places[place] = name


def _write(file: str, text: str) -> None:
    from mlx_audit.evidence.atomic import write_atomically

    if file == "-":
        print(text, end="")
        return
    try:
        write_atomically(Path(file).absolute(), text)
    except OSError as error:
        raise MlxAuditError("the report cannot be written", where=file, found=error.strerror) from error
