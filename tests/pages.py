"""Results documents to make pages of, and a viewer of pages in a browser."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

from mlx_audit.evidence.results import CheckResult, ClaimResult, Environment, KillSummary, Result, Results

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    '"><svg onload=alert(2)>',
    "' autofocus onfocus=alert(3) '",
    "{{ 7 * 7 }}{% for x in y %}",
    "llama\u202e\u2066evil\u2069",
    "nul\x00bell\x07esc\x1b[31m",
    "https://example.com/<b>" + "x" * 100_000,
    "javascript:alert(4)",
    "half a pair \ud83d",
    "",
)


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


def hostile_document() -> Results:
    """Every text that a results file can hold, in every hostile form."""
    results = []
    for text in HOSTILE:
        bad = check(
            text,
            "fail",
            name=text,
            reason=text,
            where=text,
            reproduce=text,
            figures={text: text, "nested": {text: [text, {text: text}]}, "layers": [[text, 2]]},
        )
        topology = check("TOP001", tier="static", figures={"kinds": {text: 1}, "layers": [[text, 3]]})
        faults = KillSummary(profile=text, killed={text: [text]}, survived=[text], unshown=[text])
        results.append(
            result(
                text,
                "not-capable",
                variant=text,
                configuration=text,
                checks=[topology, bad],
                reason=text,
                limits=[text],
                digests={text: text},
                profile=text,
                faults=faults,
                claims={text: ClaimResult(claimed="capable", verdict="not-capable", reason=text)},
            )
        )
    texts = dict.fromkeys(("mlx_audit", "mlx", "mlx_lm", "python", "platform", "compiler"), HOSTILE[0])
    return document(*results, backend=HOSTILE[1], **texts)


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
