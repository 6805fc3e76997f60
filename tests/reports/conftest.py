"""Pages to look at: of the committed records, and of real checks; and a browser to look with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from audited import green, new_subject
from mlx_audit import resources
from mlx_audit.evidence.recorded import record_results
from mlx_audit.evidence.records import load_record
from mlx_audit.evidence.results import KillSummary, Results
from mlx_audit.manifests import load_manifest
from mlx_audit.reports.html import render
from pages import Viewer, check, document, result

REQUIRED = "MLX_AUDIT_BROWSER_REQUIRED"
"""Set where a missing browser is a failure: in CI."""


@pytest.fixture(scope="session")
def recorded() -> list[Results]:
    """All committed records, as documents."""
    return records_of("*")


def records_of(families: str) -> list[Results]:
    """The committed records of the families that a pattern names, as documents."""
    audits = resources.model_audits()
    return [
        record_results(load_record(file), load_manifest(audits / f"{file.parent.name}.yaml"))
        for file in sorted((audits / "records").glob(f"{families}/*.json"))
    ]


@pytest.fixture(scope="session")
def audited_document() -> Results:
    """What the checks that the drawings are made of say of a healthy llama, with faults as a record has them."""
    checks = [green(code, new_subject()) for code in ("TOP001", "TRC002", "NEG001")]
    checks.append(green("PAR001", new_subject(main=False)))  # in one dtype alone
    faults = KillSummary(
        profile="ci",
        killed={"PAR001": ["frozen_rope", "mask_left_out"], "TRC001": ["frozen_write"]},
        survived=["rope_one_late"],
        unshown=["ring_turns_one_early"],
    )
    failing = check(
        "MSK001",
        "fail",
        reason="`token 3` is hidden",
        where="step 4, caches[0]",
        reproduce="mlx-audit run llama --only MSK001",
    )
    return document(
        result(checks=checks, faults=faults),
        result("olmo", "not-capable", "capable", checks=[failing], reason="MSK001 failed"),
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, one a module; without one the test is left out, or fails where CI asks for it."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    paths = [*filter(None, map(shutil.which, names)), None]  # without a path, Playwright's own
    with sync_playwright() as playwright:
        running = _started(playwright.chromium, paths)
        yield running
        running.close()


def _started(chromium: Any, paths: Sequence[str | None]) -> Any:
    from playwright.sync_api import Error

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    reasons = []
    for path in paths:
        try:
            return chromium.launch(executable_path=path, args=arguments)
        except Error as error:
            reasons.append(error.message.splitlines()[0])
    reason = f"no Chromium can be started: {'; '.join(reasons)}"
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{reason}; {REQUIRED} is set")
    pytest.skip(reason)


@pytest.fixture
def viewer(browser: Any, tmp_path: Path) -> Iterator[Viewer]:
    """Opens pages; at the end, nothing that must not happen has happened."""
    made = Viewer(browser, tmp_path)
    yield made
    made.close()
    assert made.noted == []


@pytest.fixture(scope="session")
def recorded_page(recorded: list[Results]) -> str:
    """The page of all committed records."""
    return render(recorded)


@pytest.fixture(scope="session")
def some_records() -> list[Results]:
    """Those of the families that begin with `qwen2` or `llama`: every verdict but `undecided`, and two variants."""
    return [*records_of("llama*"), *records_of("qwen2*")]


@pytest.fixture(scope="session")
def some_page(some_records: list[Results]) -> str:
    """The page of these."""
    return render(some_records)


@pytest.fixture(scope="session")
def audited_page(audited_document: Results) -> str:
    """The page of what the checks say, one claim failing."""
    return render([audited_document])
