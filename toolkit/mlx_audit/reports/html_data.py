"""What the HTML page shows on demand, packed: each check, name and fault once, the rest points to them."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_audit.errors import clean
from mlx_audit.evidence.results import CheckResult, KillSummary, Result
from mlx_audit.reports.documents import Document, claims_of
from mlx_audit.reports.html_board import MOST_NAME, Block, Line

_MOST_TEXT = 600
"""Characters of a text among the figures."""

_MOST_ITEMS = 1_000
_DEEPEST = 6
_SAFE_INTEGER = 2**53
"""A script holds no larger integer exactly."""


class Packer:
    """Makes the data of the page; equal things are stored once."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[str, int]] = {name: {} for name in ("names", "checks", "faults")}

    def pack(
        self, families: Mapping[str, Sequence[tuple[Block, list[Line]]]], places: Sequence[Document]
    ) -> dict[str, Any]:
        """Return the data as JSON values.

        Args:
            families: Blocks with their lines, by the page's name of the section.
            places: Where the results were made; blocks point to them.
        """
        packed = {section: [self._block(*block) for block in blocks] for section, blocks in families.items()}
        pools = {name: [json.loads(text) for text in pool] for name, pool in self._pools.items()}
        return {"places": [place.label for place in places], "families": packed, **pools}

    def _block(self, block: Block, lines: Sequence[Line]) -> dict[str, Any]:
        first = block.results[0]
        faults = next((result.faults for result in block.results if result.faults is not None), None)
        return {
            "variant": _name(block.variant),
            "place": block.place,
            "target": _name(first.target),
            "claims": [[line.claim, line.claimed, line.standing, line.verdict, line.only] for line in lines],
            "limits": [clean(limit) for limit in first.limits],
            "digests": {_name(key): clean(value, MOST_NAME) for key, value in first.digests.items()},
            "profile": _name(first.profile),
            "seed": first.seed,
            "kills": None if faults is None else self._faults(faults),
            "results": [self._result(result) for result in block.results],
        }

    def _result(self, result: Result) -> list[Any]:
        checks = [self._check(check) for check in result.checks]
        unclaimed = all(claim.claimed == "undecided" for claim in claims_of(result).values())
        seconds = _rounded(round(result.seconds, 1))
        return [_name(result.configuration), result.verdict, clean(result.reason), checks, seconds, unclaimed]

    def _check(self, check: CheckResult) -> int:
        name = self._pooled("names", [clean(check.code, 20), clean(check.name, MOST_NAME), check.tier])
        where = clean(check.where) if check.where else ""
        reproduce = clean(check.reproduce) if check.reproduce else ""
        figures = plain(check.figures)
        return self._pooled("checks", [name, check.status, clean(check.reason), figures, where, reproduce])

    def _faults(self, summary: KillSummary) -> dict[str, Any]:
        return {
            "profile": _name(summary.profile),
            "killed": [
                [clean(code, 20), [self._fault(name) for name in names]]
                for code, names in sorted(summary.killed.items())
            ],
            "survived": [self._fault(name) for name in summary.survived],
            "unshown": [self._fault(name) for name in summary.unshown],
        }

    def _fault(self, name: str) -> int:
        return self._pooled("faults", _name(name))

    def _pooled(self, pool: str, value: Any) -> int:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return self._pools[pool].setdefault(text, len(self._pools[pool]))


def packed_text(data: Any) -> str:
    """Return data as base64 of gzip of JSON: the same text for the same data, and nothing that HTML could read."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


def plain(value: Any, depth: int = 0) -> Any:
    """Return figures as a page can hold them: cleaned, bounded, numbers to four digits, what JSON lacks as text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _SAFE_INTEGER else clean(value, 80)
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, str):
        return clean(value, _MOST_TEXT)
    if depth >= _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        items = list(value.items())
        shown = {_name(key): plain(item, depth + 1) for key, item in items[:_MOST_ITEMS]}
        return shown | ({"…": f"{len(items) - _MOST_ITEMS:,} more"} if items[_MOST_ITEMS:] else {})
    if isinstance(value, Sequence):
        more = [f"… {len(value) - _MOST_ITEMS:,} more"] if value[_MOST_ITEMS:] else []
        return [plain(item, depth + 1) for item in value[:_MOST_ITEMS]] + more
    return clean(value, _MOST_TEXT)


def _rounded(value: float) -> float | str:
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "−∞"
    return float(f"{value:.4g}")


def _name(value: object) -> str:
    return clean(value, MOST_NAME)
