"""Properties: claims about drawn arguments, by Hypothesis inside the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from mlx_audit.checks.subject import Subject


def require_always(
    subject: Subject,
    strategy: dict[str, Any],
    example: Callable[..., None],
    *,
    always: Sequence[dict[str, Any]] = (),
    share: int = 1,
) -> None:
    """Run `example` for given arguments, and then for drawn ones.

    Args:
        subject: Its profile says how many are drawn, and its seed which.
        strategy: One strategy an argument.
        example: Raises where the claim does not hold.
        always: Arguments that must never be left out.
        share: Divides the profile's number of examples.
    """
    for arguments in always:
        example(**arguments)
    amounts = subject.amounts

    def drawn(**arguments: Any) -> None:
        example(**arguments)

    run = given(**strategy)(drawn)
    limits = settings(
        max_examples=max(2, amounts.examples // share),
        derandomize=amounts.derandomize,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    try:
        (limits(run) if amounts.derandomize else seed(subject.seed)(limits(run)))()
    except BaseExceptionGroup as group:  # a failure that an equal example does not show again
        raise group.exceptions[0] from None
