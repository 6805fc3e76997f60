"""What the parent asks of a child: one target and what to do with it, as one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlx_audit.evidence.results import TIERS, Tier
from mlx_audit.manifests import load_manifest
from mlx_audit.models.target import Target


class Options(BaseModel):
    """What `run` is told beside its targets."""

    model_config = ConfigDict(extra="forbid")

    tiers: list[Tier] = Field(default_factory=lambda: list(TIERS))
    only: list[str] = Field(default_factory=list)
    profile: str = "quick"
    dtype: str = "float32"
    seed: int = 0
    repro: bool = False
    """Whether a failure is made smaller and written as a script."""

    @property
    def partial(self) -> bool:
        """Whether some checks were left out on purpose, so that nothing can be proved."""
        return bool(self.only) or set(self.tiers) != set(TIERS)

    def selects(self, code: str, tier: Tier) -> bool:
        """Return whether a check is to be run."""
        return tier in self.tiers and (not self.only or code in self.only)


Panel = Literal["named", "core", "all"]


class Planting(BaseModel):
    """What a child is asked to plant.

    Attributes:
        faults: Names; those that don't apply to a stack are left out.
        variant: The only variant of the family to plant in; all by default.
        panel: Checks that are run for each fault: the named one, also a quick core, or all.
        once: Plant each fault in the first variant that it applies to, not in every one.
        healthy: Run the checks on the healthy stack first.
    """

    model_config = ConfigDict(extra="forbid")

    faults: list[str] = Field(default_factory=list)
    variant: str | None = None
    panel: Panel = "core"
    once: bool = False
    healthy: bool = True


class Request(BaseModel):
    """A resolved target, which the child need not resolve again, and the options."""

    model_config = ConfigDict(extra="forbid")

    text: str
    kind: Literal["family", "manifest", "file", "checkpoint"]
    family: str
    manifest: Path | None
    module: str | None
    file: Path | None
    folder: Path | None
    config: dict[str, Any] | None
    config_name: str | None
    config_path: Path | None
    options: Options
    overlay: dict[str, Path] = Field(default_factory=dict)
    """Patched sources that the model is made of, by module name or file."""
    unloadable: str = ""
    """Why the model's code is not to be run: it ended or held up the process that ran it."""
    planting: Planting | None = None
    """What to plant, where the faults and not the model are what is looked at."""

    @classmethod
    def of(cls, target: Target, options: Options, config_path: Path | None = None) -> Request:
        """Return the request for a target.

        Args:
            target: What to audit.
            options: How.
            config_path: What `--config` named, for commands that reproduce a failure.
        """
        return cls(
            text=target.text,
            kind=target.kind,
            family=target.family,
            manifest=target.manifest.path.resolve() if target.manifest is not None else None,
            module=target.module,
            file=target.file.resolve() if target.file is not None else None,
            folder=target.folder,
            config=_plain(target.config),
            config_name=target.config_name,
            config_path=config_path,
            options=options,
        )

    def target(self) -> Target:
        """Return the target again; its manifest is read, nothing is looked up."""
        return Target(
            self.text,
            self.kind,
            self.family,
            load_manifest(self.manifest) if self.manifest is not None else None,
            module=self.module,
            file=self.file,
            folder=self.folder,
            config=self.config,
            config_name=self.config_name,
            overlay=self.overlay,
        )


def _plain(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return dict(config) if config is not None else None
