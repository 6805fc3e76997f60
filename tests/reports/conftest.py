"""Pages to look at: of the committed records, of a real check, of made-up names; and a browser to look with."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audited import green, healthy
from mlx_audit import resources
from mlx_audit.evidence.recorded import record_results
from mlx_audit.evidence.records import load_record
from mlx_audit.evidence.results import CheckResult, ClaimResult, Environment, KillSummary, Result, Results
from mlx_audit.manifests import load_manifest
from mlx_audit.reports.html import render

REQUIRED = "MLX_AUDIT_BROWSER_REQUIRED"
"""Set where a missing browser is a failure: in CI."""


def environment(backend: str = "cpu", **changes: Any) -> Environment:
    """Return an environment."""
    facts = {
        "mlx_audit": "0.1",
        "mlx": "0.32.4",
        "mlx_lm": "0.32.2",
        "python": "3.12.1",
        "platform": "linux-x86_64",
    }
    return Environment(**{**facts, "backend": backend, "compiler": "/usr/bin/g++", **changes})


def check(code: str = "PAR001", status: Any = "pass", **options: Any) -> CheckResult:
    """Return a check."""
    defaults = {"name": f"what {code} holds", "tier": "numeric"}
    return CheckResult(code=code, status=status, **{**defaults, **options})


def result(
    family: str = "llama",
    verdict: Any = "capable",
    claimed: Any = "capable",
    *,
    variant: str = "full",
    configuration: str = "tiny",
    checks: list[CheckResult] | None = None,
    **options: Any,
) -> Result:
    """Return a result with one claim."""
    claims = {"compiled_decode": ClaimResult(claimed=claimed, verdict=verdict)}
    return Result(
        target=family,
        family=family,
        variant=variant,
        configuration=configuration,
        verdict=verdict,
        checks=[check()] if checks is None else checks,
        **{"claims": claims, **options},
    )


def document(*results: Result, **changes: Any) -> Results:
    """Return a document of one environment."""
    return Results(environment=environment(**changes), results=list(results))


@pytest.fixture(scope="session")
def recorded() -> list[Results]:
    """All committed records, as documents."""
    audits = resources.model_audits()
    return [
        record_results(load_record(file), load_manifest(audits / f"{file.parent.name}.yaml"))
        for file in sorted((audits / "records").glob("*/*.json"))
    ]


@pytest.fixture(scope="session")
def audited_document() -> Results:
    """What the checks that the drawings are made of say of a healthy llama, with faults as a record has them."""
    checks = [green(code, healthy()) for code in ("TOP001", "TRC002", "NEG001", "PAR001")]
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


def varied(documents: list[Results], families: int) -> list[Results]:
    """Return documents of that many families: those given under new names, with other numbers in their figures.

    No two copies share a measured number, so that storing equal things once gains no more than it would with as many
    real families. Each has what newer results have: the order of layers, differences, and what became of faults.
    """
    by_family: dict[str, list[Results]] = {}
    for one in documents:
        by_family.setdefault(one.results[0].family, []).append(one)
    sources = list(by_family.values())
    made = []
    for index in range(families):
        source = random.Random(index)
        for one in sources[index % len(sources)]:
            twin = copy.deepcopy(one)
            for own in twin.results:
                own.family = own.target = f"{own.family}_{index}"
                own.checks = [_varied_check(found, source) for found in own.checks]
                own.faults = own.faults or _faults(source)
            made.append(twin)
    return made


def _varied_check(found: CheckResult, source: random.Random) -> CheckResult:
    figures = _varied(found.figures, source)
    if found.code == "TOP001" and figures:
        kinds = found.figures.get("kinds", {"linear": 4})
        rest = [kind for kind, count in kinds.items() for _ in range(count)]
        source.shuffle(rest)
        figures.setdefault("layers", [[f"{kind}(window={source.randrange(4096)})", 1] for kind in rest])
    if found.code == "PAR001" and isinstance(figures.get("float32"), dict):
        figures["float32"].setdefault("differences", [float(f"{source.random():.3g}") for _ in range(64)])
    return found.model_copy(update={"figures": figures})


def _varied(value: Any, source: random.Random) -> Any:
    if isinstance(value, dict):
        return {key: _varied(item, source) for key, item in value.items()}
    if isinstance(value, list):
        return [_varied(item, source) for item in value]
    if isinstance(value, float) and value:
        return value * (1 + source.random())
    return value


def _faults(source: random.Random) -> KillSummary:
    names = [f"a_fault_with_a_name_of_usual_length_{number}" for number in range(150)]
    source.shuffle(names)
    killed = {f"PAR{number:03}": names[number * 5 : number * 5 + 5] for number in range(22)}
    return KillSummary(profile="ci", killed=killed, survived=names[110:112], unshown=names[112:])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, one a module; without one the test is left out, or fails where CI asks for it."""
    from playwright.sync_api import Error, sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_playwright() as playwright:
        try:
            # Without a path, Playwright's own.
            running = playwright.chromium.launch(executable_path=path, args=arguments)
        except Error as error:
            reason = f"no Chromium can be started: {error.message.splitlines()[0]}"
            if os.environ.get(REQUIRED) == "1":
                pytest.fail(f"{reason}; {REQUIRED} is set")
            pytest.skip(reason)
        yield running
        running.close()


class Viewer:
    """Opens pages in contexts of their own, and notes what must not happen: requests, messages, dialogs."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self._browser = browser
        self._folder = folder
        self._contexts: list[Any] = []
        self.noted: list[str] = []

    def open(self, html: str, fragment: str = "", **options: Any) -> Any:
        """Return the page of a file, loaded."""
        file = self._folder / "page.html"
        file.write_text(html, encoding="utf-8")
        context = self._browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        context.set_default_timeout(10_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self.noted.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.noted.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self._request(request.url, file))
        page.goto(f"{file.as_uri()}{fragment}")
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _dialog(self, dialog: Any) -> None:
        self.noted.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, url: str, file: Path) -> None:
        if url.partition("#")[0] != file.as_uri() and url != "data:,":
            self.noted.append(f"request: {url}")


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
def audited_page(audited_document: Results) -> str:
    """The page of what the checks say, one claim failing."""
    return render([audited_document])
