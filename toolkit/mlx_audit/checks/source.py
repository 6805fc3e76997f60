"""SRC: what reading a model's source says of the position; the model is neither imported nor run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_audit.checks.base import Check, CheckFailed, Figures, NotRun
from mlx_audit.checks.subject import Source, Subject
from mlx_audit.evidence.conditions import is_met
from mlx_audit.source import OWN_CACHE, Consumer, SourceReport

_MOST = 20
"""Places that figures list."""


class SourceCheck(Check):
    """Base of what the source alone decides; a subclass is a class of hazards, with its code."""

    tier = "static"
    by_reading = True
    repeated = True

    def run(self, subject: Subject) -> Figures:
        model = subject.lazy_model
        return self._judge(subject.source.report(), lambda hazard: is_met(model, hazard.needs, hazard.when))

    def read(self, source: Source) -> Figures:
        return self._judge(source.report(), lambda _: False)

    def _judge(self, report: SourceReport, met: Callable[[Consumer], bool]) -> Figures:
        """Fail at the first hazard that this configuration has; name those that others have."""
        if report.unreadable:
            raise NotRun(f"the source cannot be followed: {report.unreadable}")
        own = [hazard for hazard in report.hazards if hazard.code == self.code]
        sure = [hazard for hazard in own if not (hazard.when or hazard.needs) or met(hazard)]
        sure.sort(key=lambda hazard: hazard.kind != OWN_CACHE)  # the class, before what it does
        others = [hazard for hazard in own if hazard not in sure]
        if sure:
            more = [_text(hazard) for hazard in sure[1:_MOST]]
            raise CheckFailed(
                sure[0].what, where=sure[0].where, figures={"more_places": more} if more else {}
            )
        figures: Figures = {"consumers": len(report.consumers)}
        if others:
            # Not for people alone: a session refuses a model that meets one of them.
            figures["conditional"] = [_condition(hazard) for hazard in others]
        return figures


def _text(hazard: Consumer) -> str:
    return f"{hazard.where} {hazard.kind}: {hazard.what}"


def _condition(hazard: Consumer) -> dict[str, Any]:
    return {"what": _text(hazard), "needs": list(hazard.needs), "when": hazard.when}


class PositionStaysOnDevice(SourceCheck):
    """The position of the cache is never read on the host.

    What it does:
        Follows `cache.offset`, and what is computed from it, through the model module and the helpers that it imports,
        to every place that consumes it. RoPE offsets, masks, updates and array arithmetic stay in the graph. int(),
        .item(), bounds of range, arange and slices, branches, Python's max and min, text and NumPy read the value. A
        place that only some configurations reach counts for those alone. The caches of mlx-lm itself are not followed.

    Why:
        In a compiled step the position is an array without a value. Reading it raises; and where the cache still has a
        host integer, its value of the first step is frozen into the graph, which goes on and is wrong.

    Example:
        mlx_lm/models/gpt_bigcode.py:150:30: `np.arange` is bounded by the position

    How to fix:
        Compute with arrays: `mx.arange(L) + mx.array(offset)[..., None]` for a range (rows of different length have an
        offset each), `mx.maximum` for max, `mx.where` for a branch.
        `mlx-audit adapt TARGET --as patch` mends the patterns that it knows.

    Sources:
        mlx 0.32.4: "Attempting to eval an array during function transformations"
    """

    code = "SRC001"
    tier = "static"


class LengthIsNotPosition(SourceCheck):
    """The length of the key buffer is never taken for the position.

    What it does:
        Follows `keys.shape[2]` of what `update_and_fetch` returned to RoPE offsets, ranges and block numbers. Rows that
        are counted from the end of the buffer, such as `keys[:, :, -window:]`, are found too.

    Why:
        A cache of fixed capacity returns its whole buffer, so the length is the capacity from the first token on:
        every query would be rotated to the last position, and nothing would raise.

    Example:
        mlx_lm/models/afm7.py:255:44: `S - L`, a key length, is the RoPE offset

    How to fix:
        Take the position from the cache, before the update: `offset = cache.offset`. Rotate keys by it before they go
        into the cache, not after.

    Sources:
        mlx_lm/models/afm7.py, minimax_m3_vl.py, phi3small.py of mlx-lm 0.32.2
    """

    code = "SRC002"
    tier = "static"


class MaskIsApplied(SourceCheck):
    """A boolean mask is applied, never added.

    What it does:
        Follows masks from `create_attention_mask` and `make_mask` to additions, unless the dtype is looked at first.
        Attention over a cache's keys without any mask is found too.

    Why:
        True added to a score is 1.0: nothing is hidden, and unwritten slots of the buffer are attended to. Eager
        decoding of single tokens has no mask, so that the line never ran there.

    Example:
        mlx_lm/models/olmo.py:93:13: a mask is added to `scores`

    How to fix:
        `mx.where(mask, scores, -inf)`, or `scaled_dot_product_attention` of mlx_lm/models/base.py.

    Sources:
        mlx_lm/models/olmo.py and phi3small.py of mlx-lm 0.32.2
    """

    code = "SRC003"
    tier = "static"


class StateLivesInCaches(SourceCheck):
    """No state of decoding lives outside the caches.

    What it does:
        Looks for assignments to attributes, globals and memos, in code that a step reaches, of what comes from tokens,
        caches or masks. What comes from weights alone is harmless.

    Why:
        State that is not in the caches does not go through the compiled step: it is frozen, or an array of the trace
        is left behind in it. A copied or restored session would not have it.

    Example:
        my_model.py:61:13: `self.last_position` keeps the position between steps

    How to fix:
        Keep the state in an entry of `make_cache()`: an ArraysCache has room for any array.

    Sources:
        mlx 0.32.4: arrays of a trace raise "an array without a primitive" when they are used later
    """

    code = "SRC004"
    tier = "static"


class DataStaysOnDevice(SourceCheck):
    """No data of the step is read on the host.

    What it does:
        Looks for .item(), .tolist(), NumPy conversions and branches on arrays that come from the tokens.

    Why:
        A compiled step is traced without values: reading one raises.

    Example:
        mlx_lm/models/dbrx.py:163:57: `inds.tolist()` reads the routing of experts

    How to fix:
        Gather on the device: mlx_lm/models/switch_layers.py does so for experts.

    Sources:
        mlx_lm/models/dbrx.py of mlx-lm 0.32.2
    """

    code = "SRC005"
    tier = "static"


class OwnCacheOnDevice(SourceCheck):
    """A cache class of the model's own keeps position and size on the device.

    What it does:
        Looks, in each class that `make_cache` makes entries of and that mlx-lm's cache module does not have, for
        integers that an update moves on, and for arrays that grow.

    Why:
        Both change from step to step: the integer would be frozen, and each new shape traces anew.

    Example:
        mlx_lm/models/deepseek_v41.py:274:9: LayerCache moves `offset` on as a Python integer

    How to fix:
        Give the model a `new_fixed_capacity_cache` whose caches have buffers of full size and an array as position.

    Sources:
        mlx_lm/models/deepseek_v41.py of mlx-lm 0.32.2
    """

    code = "SRC006"
    tier = "static"
