"""Every file in broken/ is refused with exactly the problems of EXPECTED.tsv, by the loader and by the command."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_audit.cli import application
from mlx_audit.manifests import ManifestError, load_manifest

FOLDER = Path(__file__).parent / "broken"


def _expected() -> dict[str, list[tuple[str, list[str]]]]:
    table: dict[str, list[tuple[str, list[str]]]] = {}
    with (FOLDER / "EXPECTED.tsv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE):
            table.setdefault(row["file"], []).append((row["place"], row["message"].split(" … ")))
    return table


EXPECTED = _expected()


def test_every_file_is_in_the_table() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in FOLDER.glob("*.yaml"))
    assert len(EXPECTED) >= 20


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_loader_reports_each_problem_at_its_place(name: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifest(FOLDER / name)
    problems = caught.value.problems
    found = [f"{problem.line}:{problem.column}" for problem in problems]
    assert found == [place for place, _ in EXPECTED[name]], "\n".join(map(str, problems))
    for problem, (_, fragments) in zip(problems, EXPECTED[name], strict=True):
        for fragment in fragments:
            assert fragment in str(problem)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_command_exits_2_and_prints_no_traceback(name: str) -> None:
    result = CliRunner().invoke(application(), ["validate", str(FOLDER / name)])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    for place, fragments in EXPECTED[name]:
        assert f"{name}:{place}: {fragments[0]}" in result.stderr
    assert result.stdout == ""
