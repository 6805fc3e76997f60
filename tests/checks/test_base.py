"""What every check has, in which order checks come, and what `execute` makes of each way to end."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_audit.checks
from audited import all_results, check, green, healthy, mutated, new_subject, only, red, statuses
from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun, all_checks, execute
from mlx_audit.checks.subject import Subject
from mlx_audit.errors import ShapeMismatch
from mlx_audit.evidence.codes import DECODE, RESTORE, claim_of
from mlx_audit.evidence.results import CheckResult, Status
from mlx_audit.faults import FAULTS
from mlx_audit.tracing import ExportRefused
from mutations import MUTATIONS

STABLE = [
    "TOP001",
    "TOP002",
    "TOP003",
    "TOP004",
    "TRC001",
    "TRC002",
    "TRC003",
    "TRC004",
    "TRC005",
    "ENV001",
    "NEG001",
    "PAR001",
    "PAR002",
    "PAR003",
    "PAR004",
    "PAR005",
    "PAR007",
    "STA001",
    "STA002",
    "STA003",
    "STA004",
    "STA005",
    "STA006",
    "MSK001",
    "MSK002",
    "MSK003",
    "CAP001",
    "CAP002",
    "CAP003",
    "LIF001",
    "LIF002",
    "LIF003",
    "LIF004",
    "CKP001",
    "CKP002",
    "CKP003",
    "CKP004",
]
_CODE = re.compile(r'^    code = "', re.MULTILINE)
HEADINGS = ("What it does:", "Why:", "Example:", "How to fix:", "Sources:")


class _Trial(Check):
    """A check of the test's own, without a code, so that no scan finds it."""

    tier = "numeric"

    def __init__(self, error: BaseException | None = None, requires: tuple[str, ...] = ()) -> None:
        self.code, self.error, self.requires = "TRY001", error, requires  # type: ignore[misc]

    def run(self, subject: Subject) -> Figures:
        if self.error is not None:
            raise self.error
        return {"seen": 1}


def _result(code: str, status: Status) -> CheckResult:
    return CheckResult(code=code, name="", tier="numeric", status=status)


def test_codes_are_stable_and_unique() -> None:
    codes = [found.code for found in all_checks()]
    assert len(codes) == len(set(codes))
    assert set(STABLE) <= set(codes), "codes are published: a check may be added, never renamed"


def test_a_check_comes_after_those_that_it_requires() -> None:
    seen: set[str] = set()
    for found in all_checks():
        assert set(found.requires) <= seen, (found.code, found.requires)
        seen.add(found.code)


def test_every_file_of_the_folder_is_found_without_a_list() -> None:
    folder = Path(mlx_audit.checks.__file__ or "").parent
    holding = {path.name for path in folder.glob("*.py") if _CODE.search(path.read_text(encoding="utf-8"))}
    assert holding == {Path(inspect.getfile(type(found))).name for found in all_checks()}
    assert Path(mlx_audit.checks.__file__ or "").read_text(encoding="utf-8").count("import") == 0


@pytest.mark.parametrize("code", [found.code for found in all_checks()])
def test_the_page_of_a_check_is_complete(code: str) -> None:
    page = check(code).page
    first, blank, *_ = page.splitlines()
    assert first.endswith(".")
    assert not blank
    assert len(first) < 110
    places = [page.find(f"\n{heading}\n") for heading in HEADINGS]
    assert -1 not in places, dict(zip(HEADINGS, places, strict=True))
    assert places == sorted(places)
    for heading, following in zip(HEADINGS, [*HEADINGS[1:], None], strict=True):
        body = page.split(f"\n{heading}\n")[1]
        body = body.split(f"\n{following}\n")[0] if following else body
        assert body.strip(), heading


def test_first_lines_tell_the_checks_apart() -> None:
    names = [found.name for found in all_checks()]
    assert len(set(names)) == len(names)


def test_a_pass_carries_its_figures() -> None:
    result = execute(_Trial(), healthy(), {})
    assert (result.status, result.reason, result.figures) == ("pass", "", {"seen": 1})


def test_a_failure_carries_reason_place_and_figures() -> None:
    failure = CheckFailed("got 1, wanted 2", where="step 3", figures={"compared": 2})
    result = execute(_Trial(failure), healthy(), {})
    assert result.status == "fail"
    assert (result.reason, result.where, result.figures) == ("got 1, wanted 2", "step 3", {"compared": 2})


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotRun("no compiler"), "not-run", "no compiler"),
        (ExportRefused("MLX's exporter refused the graph", found="Fence"), "not-run", "Fence"),
        (ShapeMismatch("the tokens have the wrong shape", where="step"), "fail", "step: the tokens have"),
        (
            KeyError("layers"),
            "not-run",
            "internal error of mlx-audit, please report it: KeyError: 'layers' at test_base",
        ),
        (
            RuntimeError("[eval] Attempting to eval an array without a primitive."),
            "fail",
            "kept outside the caches",
        ),
    ],
)
def test_how_an_exception_counts(error: Exception, status: str, reason: str) -> None:
    result = execute(_Trial(error), healthy(), {})
    assert result.status == status
    assert reason in result.reason
    assert "Traceback" not in result.reason
    assert "\n" not in result.reason


def test_an_exception_of_the_model_fails_and_names_its_line(tmp_path: Path) -> None:
    module = mutated(
        tmp_path, ("        return self.norm(h)\n", "        return self.norm(h)[self.absent]\n")
    )
    result = red("PAR001", new_subject(module=module))
    line = (
        Path(module.__file__ or "").read_text(encoding="utf-8")[:-1].split("self.absent")[0].count("\n") + 1
    )
    assert "absent" in result.reason
    assert result.where == f"{Path(module.__file__ or '').name}:{line}"


def test_a_hostile_message_of_the_model_can_be_stored_and_shown_in_one_line(tmp_path: Path) -> None:
    message = "'first\\nsecond\\x1b[2J\\ud800' + 'x' * 200_000"
    raising = f"        raise RuntimeError({message})\n"
    module = mutated(tmp_path, ("        return self.norm(h)\n", raising))
    result = red("PAR001", new_subject(module=module))
    assert result.model_dump_json().encode()
    assert len(result.reason) < 100_000
    assert "\ud800" not in result.reason


def test_ctrl_c_is_not_a_result() -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(_Trial(KeyboardInterrupt()), healthy(), {})


@pytest.mark.parametrize(
    ("before", "status", "reason"),
    [
        ("pass", "pass", ""),
        ("not-applicable", "pass", ""),
        ("fail", "not-run", "needs ENV001, which failed"),
        ("not-run", "not-run", "needs ENV001, which was not run"),
    ],
)
def test_what_a_required_check_allows(before: Status, status: str, reason: str) -> None:
    result = execute(_Trial(requires=("ENV001",)), healthy(), {"ENV001": _result("ENV001", before)})
    assert (result.status, result.reason) == (status, reason)


def test_a_required_check_that_was_not_selected_does_not_block() -> None:
    assert execute(_Trial(requires=("ENV001",)), healthy(), {}).status == "pass"


def test_checks_that_are_not_repeated_run_on_the_main_configuration_only() -> None:
    other = new_subject(main=False)
    assert only("STA003", other).status == "not-applicable"
    assert "main configuration" in only("STA003", other).reason
    green("STA001", other)


ONE_RED = {
    "write_one_early": "PAR001",
    "write_by_select": "TRC004",
    "fetched_zeros": "TRC003",
    "state_comes_out_wider": "TRC002",
    "rope_one_late": "PAR001",
    "mask_of_a_chunk_shows_one_ahead": "PAR003",
    "mask_by_content": "MSK001",
    "position_as_python_int": "ENV001",
    "copies_share_everything": "STA002",
    "trim_lies": "STA003",
    "unwritten_slots_hold_infinity": "MSK002",
    "parameters_captured": "TRC001",
}


def of_claim(results: dict[str, CheckResult], claim: str) -> dict[str, CheckResult]:
    return {code: result for code, result in results.items() if claim_of(code) == claim}


SLOW = ("mask_of_a_chunk_shows_one_ahead", "mask_by_content", "trim_lies", "unwritten_slots_hold_infinity")
"""Hypothesis makes their failures smaller, check by check."""


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.nightly] if name in SLOW else []) for name in ONE_RED]
)
def test_one_fault_gives_one_red_line(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    everything = all_results(new_subject())
    results = of_claim(everything, DECODE)
    assert statuses(results, "fail") == [ONE_RED[fault]]
    waiting = statuses(results, "not-run")
    assert all(results[code].reason.startswith("needs ") for code in waiting)
    assert bool(waiting) == any(
        ONE_RED[fault] in found.requires for found in all_checks() if found.claim == DECODE
    )
    # What breaks compiled decoding is nothing to restored prefixes.
    restored = of_claim(everything, RESTORE)
    assert {result.status for result in restored.values()} <= {"pass", "not-applicable"}
    assert restored["RST001"].status == "pass"


@pytest.mark.parametrize("mutation", ["rope_offset_by_int", "toggle_each_call", "mask_added_as_bool"])
def test_one_mistake_in_a_model_gives_one_red_line(mutation: str, tmp_path: Path) -> None:
    """One of what is run, beside what reading the source says of the same line."""
    results = of_claim(all_results(new_subject(module=mutated(tmp_path, *MUTATIONS[mutation]))), DECODE)
    read = [code for code in statuses(results, "fail") if code.startswith("SRC")]
    assert len(read) == 1
    assert len(statuses(results, "fail")) == 2
    assert all(results[code].reason.startswith("needs ") for code in statuses(results, "not-run"))


def test_compilation_is_on_in_these_tests() -> None:
    calls = []
    compiled = mx.compile(lambda array: calls.append(1) or array + 1)
    mx.eval(compiled(mx.array(1)), compiled(mx.array(2)))
    assert len(calls) == 1
