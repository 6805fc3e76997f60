"""Results, the verdict rule, digests, and records: what counts as proof, and when it lapses."""

from mlx_audit.evidence.capability import identify, require_capable
from mlx_audit.evidence.results import CheckResult, ClaimResult, Result, Results
from mlx_audit.evidence.verdict import Verdict, decide

__all__ = [
    "CheckResult",
    "ClaimResult",
    "Result",
    "Results",
    "Verdict",
    "decide",
    "identify",
    "require_capable",
]
