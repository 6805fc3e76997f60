"""A patch of a target's source: which files it touches, and what the audit says of the patched model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mlx_audit.adapters.patching import PatchedSource, patch_source, unified_diff
from mlx_audit.evidence.digests import mlx_lm_models
from mlx_audit.evidence.results import Result
from mlx_audit.models.target import Target

_MODELS = "mlx_lm/models/"
_PLACE = re.compile(r"(.*?:\d+:\d+) ")


@dataclass(frozen=True)
class Patch:
    """A patched model: its own file first, then the helpers that its configuration needs mended."""

    target: Target
    sources: tuple[PatchedSource, ...]

    @property
    def diff(self) -> str:
        """The whole patch; empty where there is nothing to mend."""
        return unified_diff(*self.sources)

    @property
    def applied(self) -> list[str]:
        """Names of the codemods that changed something."""
        return list(dict.fromkeys(name for source in self.sources for name in source.applied))

    @contextmanager
    def written(self) -> Iterator[dict[str, Path]]:
        """Write the patched files into a folder that lasts as long as the context, and yield the overlay."""
        with TemporaryDirectory(prefix="mlx-audit-") as folder:
            overlay = {}
            for source in self.sources:
                own = self.target.file is not None and source.path == self.target.file.resolve()
                # Named as in mlx-lm, so that messages name a place in the patched model alike.
                place = Path(folder) / (source.path.name if own else f"{source.module.replace('.', '/')}.py")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(source.after.encode())
                overlay[str(source.path) if own else source.module] = place
            yield overlay


def source_of(target: Target) -> Path:
    """Return the file that the model of a target is written in."""
    if target.file is not None:
        return target.file.resolve()
    return mlx_lm_models() / f"{(target.module or '').rpartition('.')[2]}.py"


def make_patch(target: Target, unpatched: Iterable[Result]) -> Patch:
    """Return the patch of a target.

    Args:
        target: What to patch.
        unpatched: Its static audit, which names the files whose hazards this configuration has.

    Raises:
        TargetError: a file cannot be patched.
    """
    main = source_of(target)
    named = {mlx_lm_models() / name for name in _helpers(unpatched)}
    # By name: a file in a checkout of mlx-lm is told by the same place as the installed one.
    helpers = sorted(file for file in named if file.name != main.name and file.is_file())
    sources = [patch_source(main, "" if target.file else target.module or "")]
    sources += [patch_source(file, f"mlx_lm.models.{file.stem}") for file in helpers]
    return Patch(target, tuple(source for source in sources if source.before != source.after))


def _helpers(results: Iterable[Result]) -> Iterator[str]:
    """Yield the names of mlx-lm's model files in which reading found what this configuration reaches."""
    for check in (check for result in results for check in result.checks if check.code.startswith("SRC")):
        for place in (check.where or "", *check.figures.get("more_places", ())):
            if place.startswith(_MODELS):
                yield place.removeprefix(_MODELS).partition(":")[0]


class Obstacle(NamedTuple):
    """A line that stands in the way; as text `file:line:column CODE what`."""

    place: str
    code: str
    what: str

    def __str__(self) -> str:
        return f"{self.place} {self.code} {self.what}".strip()


def obstacles(results: Iterable[Result]) -> list[Obstacle]:
    """Return all lines in which reading found what stands in the way, each once."""
    found: dict[Obstacle, None] = {}
    for check in (check for result in results for check in result.checks):
        if check.status == "fail" and check.code.startswith("SRC"):
            found[Obstacle(check.where or "", check.code, check.reason)] = None
            for text in check.figures.get("more_places", ()):
                place = _PLACE.match(text)
                rest = text[place.end() :] if place else text
                found[Obstacle(place[1] if place else "", check.code, rest)] = None
    return list(found)
