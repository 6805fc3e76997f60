"""Documents for tests of the reports: made by hand, hostile ones, and what the committed records say."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mlx_audit.evidence.codes import check_tiers, needed_codes
from mlx_audit.evidence.results import (
    CheckResult,
    ClaimResult,
    Environment,
    KillSummary,
    Result,
    Results,
    VerdictName,
)
from mlx_audit.evidence.verdict import decide
from mlx_audit.reports.recorded import recorded_documents

PLACE = "mlx_lm/models/bad.py:12:5"

HOSTILE = (
    "<script>alert(1)</script>",
    "</details></summary><img src=x onerror=alert(1)>",
    "]]></failure><testcase name='forged'/>",
    "a|b\\|c\\",
    "`code` ``more`` `",
    "[link](https://evil.example/) ![image](x.png) <https://evil.example>",
    "@everyone #1 GH-2 https://evil.example www.evil.example a@evil.example",
    "line\nbreak\r\n| row | row |\n\n# heading\n- item\n```\nfence",
    "*bold* _it_ ~~gone~~ $x$ &amp; &#64;",
    "\x00\x07\x1b[31mred\x7f\x85\u2028\ufffe\uffff\ufdd0",
    "\u202eright to left\u2066",
    "모델 🦙 Ω 𝔘",
    "\ud800 half",
    "../../etc/passwd:1:1",
    "",
    " ",
    "x" * 5_000,
    "'\"&<>;${{ github.token }}",
)
"""Texts that mean something to one format or another."""


def check(code: str = "PAR001", status: str = "pass", **more: Any) -> CheckResult:
    """Return one result of a check."""
    return CheckResult.model_validate(
        {"code": code, "name": "what must hold", "tier": "numeric", "status": status, **more}
    )


def audited(**last: Any) -> list[CheckResult]:
    """Return a pass of each check that compiled decoding needs; `last` are further values of the last one."""
    tiers, codes = check_tiers(), sorted(needed_codes())
    return [check(code, tier=tiers[code], **(last if code == codes[-1] else {})) for code in codes]


def failed(code: str = "SRC001", **more: Any) -> CheckResult:
    """Return a check of the source that failed at `PLACE`."""
    found = {"tier": "static", "where": PLACE, "reason": "`int(offset)` reads the position", **more}
    return check(code, "fail", **found)


def result(
    *checks: CheckResult,
    claimed: VerdictName | None = "capable",
    verdict: VerdictName | None = None,
    **more: Any,
) -> Result:
    """Return a result whose verdict follows from its checks."""
    found = decide(checks, limits=more.get("limits", ()))
    named: VerdictName = verdict or found.name
    claim = ClaimResult(claimed=claimed, verdict=named, reason=found.reason)
    stated = {
        "target": "bad",
        "family": "bad",
        "variant": "full",
        "configuration": "tiny",
        "reason": found.reason,
    }
    return Result.model_validate(
        {**stated, "verdict": named, "claims": {"compiled_decode": claim}, "checks": list(checks), **more}
    )


def document(*results: Result, backend: str = "cpu", **versions: str) -> Results:
    """Return a document of one environment."""
    known = {"mlx_audit": "1.0", "mlx": "0.32.4", "mlx_lm": "0.32.2", "python": "3.11.7", "platform": "linux"}
    environment = Environment(backend=backend, compiler=None, **{**known, **versions})
    return Results(environment=environment, results=list(results))


def hostile_document(texts: Sequence[str] = HOSTILE) -> Results:
    """Return a document with a text in every field that takes one, a result for each of the texts."""
    environment = Environment(
        mlx_audit=texts[0],
        mlx=texts[0],
        mlx_lm="",
        python="",
        platform="",
        backend=texts[0],
        compiler=texts[0],
    )
    return Results(environment=environment, results=[hostile_result(text) for text in texts])


def hostile_result(text: str) -> Result:
    """Return a result that fails, with a text in every field."""
    figures = {
        text: text,
        "nested": {text: [text, {text: 1.5}]},
        "conditional": [{"what": f"mlx_lm/models/x.py:3:4 kind: {text}", "needs": [text], "when": text}],
        "more_places": [f"{text}.py:7:8 kind: {text}", text],
    }
    fields = {"name": text, "reason": text, "where": f"{text}.py:5:6", "reproduce": text, "figures": figures}
    return result(
        failed(**fields),
        check(text, "not-run", **fields),
        check("ZZZ999", "not-applicable", **fields),
        target=text,
        family=text,
        variant=text,
        configuration=text,
        reason=text,
        limits=[text],
        digests={text: text},
        profile=text,
        claims={text: ClaimResult(claimed="capable", verdict="not-capable", reason=text)},
        faults=KillSummary(profile=text, killed={text: [text]}, survived=[text], unshown=[text]),
    )


@functools.cache
def recorded() -> list[Results]:
    """Return what the committed records say; read once."""
    return recorded_documents()[0]
