"""Where a draft's statements were read: places in the model's source, and what reading it found."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as native

from mlx_audit.source import Consumer, SourceReport
from mlx_audit.tracing.paths import short_path

_MOST = 12
"""Places of one sort that are listed."""


def places(module: ModuleType, model: nn.Module, arguments: Any) -> list[str]:
    """Return where the caches, the arguments and the rotary embedding are, with line numbers."""
    found = [_place(type(arguments), type(arguments).__qualname__)]
    classes: dict[Any, None] = dict.fromkeys(type(item) for item in model.modules())
    makers = dict.fromkeys(cls.make_cache for cls in classes if hasattr(cls, "make_cache"))
    found += [_place(maker, maker.__qualname__) for maker in makers]
    if not makers:
        place = _place(native.make_prompt_cache, "make_prompt_cache")
        found.append(f"{place} (no make_cache on the model, so one KVCache a layer)")
    rope = getattr(module, "initialize_rope", None)
    if rope is not None:
        found.append(_place(rope, rope.__qualname__))
    return list(dict.fromkeys(found))


def positions(report: SourceReport) -> list[str]:
    """Return remarks on who consumes the position, harmlessly."""
    safe = [item for item in report.safe if not item.when and not item.needs]
    return [f"position: {item.where} {item.symbol}, {item.kind}" for item in safe[:_MOST]] + _more(safe)


def hazards(report: SourceReport, *, of_rope: bool) -> list[str]:
    """Return remarks on what stands, or may stand, in the way of the claim.

    Args:
        report: What reading the source found.
        of_rope: Whether those that only a kind of rotary embedding reaches are wanted, or the others.
    """
    chosen = [item for item in report.hazards if ("rope_type" in item.when) == of_rope]
    found = [f"{item.code} {item.where} {item.symbol}: {item.what}{_under(item)}" for item in chosen]
    unread = (
        [f"the source could not be read: {report.unreadable}"] if report.unreadable and not of_rope else []
    )
    return [*unread, *found[:_MOST], *_more(chosen)]


def _under(item: Consumer) -> str:
    return f" (only if {item.when})" if item.when else ""


def _more(items: list[Consumer]) -> list[str]:
    return [f"and {len(items) - _MOST} more places"] if len(items) > _MOST else []


def _place(item: Any, name: str) -> str:
    try:
        file, line = inspect.getsourcefile(item), inspect.getsourcelines(item)[1]
    except (OSError, TypeError):
        return f"{getattr(item, '__module__', '')} {name}"
    return f"{short_path(Path(file or ''))}:{line} {name}"
