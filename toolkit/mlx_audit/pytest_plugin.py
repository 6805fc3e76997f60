"""The pytest plugin: `pytest model_audits/` audits each manifest, with one item a check.

pytest loads it wherever mlx-audit is installed. So nothing heavy is imported before a manifest was asked for, and only
files are collected that were named on the command line, themselves or by their folder, and are plainly manifests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlx_audit.errors import MlxAuditError

if TYPE_CHECKING:
    from mlx_audit.audit.known_failures import KnownFailure
    from mlx_audit.evidence.results import Result
    from mlx_audit.manifests import Manifest

KNOWN_FAILURES = "known_failures.txt"
"""File beside the manifests that lists what is known to fail, one `family::variant::check  # reason` a line."""

_PROFILES = ("quick", "ci", "nightly")
_TIERS = ("static", "trace", "numeric")
_NO_MANIFESTS = ("configurations", "records")
_KEY = re.compile(rb"^(family|module|topology)[ ]*:", re.MULTILINE)
_LOOKED_AT = 1 << 18
"""Bytes of a YAML file that are looked at: as many as a manifest may have."""


@dataclass
class _Audit:
    """What came of a manifest's audit: results by variant, or why there are none."""

    results: dict[str, list[Result]] = field(default_factory=dict)
    obstacle: str = ""


@dataclass
class _Run:
    """What one run of pytest was asked for, and what it has found so far."""

    manifests: frozenset[Path]
    known: Mapping[Path, Mapping[str, KnownFailure]]
    audits: dict[Path, _Audit] = field(default_factory=dict)


_RUN = pytest.StashKey[_Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("mlx-audit", "audits of compiled decoding")
    group.addoption(
        "--mlx-audit-profile", choices=_PROFILES, default="quick", help="How much each audit does."
    )
    group.addoption(
        "--mlx-audit-known",
        metavar="FILE",
        type=Path,
        help=f"Known failures, instead of the {KNOWN_FAILURES} beside the manifests.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; find the manifests that are asked for, and what is known to fail."""
    config.addinivalue_line("markers", "mlx_audit: an item of a manifest's audit.")
    for tier in _TIERS:
        config.addinivalue_line("markers", f"{tier}: a check of mlx-audit's {tier} tier.")
    manifests = frozenset(_asked_for(config))
    try:
        known = {folder: _known(config, folder) for folder in {path.parent for path in manifests}}
    except MlxAuditError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_RUN] = _Run(manifests, known)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a manifest that was asked for."""
    if file_path.suffix == ".yaml" and _place(file_path) in parent.config.stash[_RUN].manifests:
        return ManifestFile.from_parent(parent, path=file_path)
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, keep the items of a manifest on one worker, which audits it once; all others spread as ever."""
    if config.getvalue("dist") != "load" or not config.stash[_RUN].manifests:
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(".yaml") else nodeid

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say loudly that results are those of a planted fault."""
    if not config.stash[_RUN].manifests:
        return
    from mlx_audit.audit.planted import planted_warning

    if warning := planted_warning():
        terminalreporter.section("mlx-audit", red=True, bold=True)
        terminalreporter.line(warning, red=True, bold=True)


class ManifestFile(pytest.File):
    """A manifest. Its mistakes are a collection error, as `mlx-audit validate` prints them."""

    def collect(self) -> Iterator[pytest.Collector]:
        """Yield the family."""
        from mlx_audit.manifests import load_manifest

        try:
            manifest = load_manifest(self.path)
        except MlxAuditError as error:
            raise self.CollectError(str(error)) from None
        self.add_marker("mlx_audit")
        if self.config.pluginmanager.hasplugin("xdist"):
            self.add_marker(pytest.mark.xdist_group(name=manifest.family))
        yield Family.from_parent(self, name=manifest.family, manifest=manifest)


class Family(pytest.Collector):
    """The first part of an item's name."""

    def __init__(self, *, manifest: Manifest, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.manifest = manifest

    def collect(self) -> Iterator[pytest.Collector | pytest.Item]:
        """Yield the variants, and an item for each line of known failures that names no item."""
        variants = [Variant.from_parent(self, name=name) for name in self.manifest.variants]
        yield from variants
        items = {f"{self.name}::{variant.name}::{name}" for variant in variants for name in variant.names()}
        for known in self.config.stash[_RUN].known[self.path.parent.resolve()].values():
            if known.family == self.name and known.item not in items:
                yield UnknownLine.from_parent(
                    self, name=Path(known.where).name, known=known, items=sorted(items)
                )


class Variant(pytest.Collector):
    """The second part of an item's name."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item a check, then the verdict."""
        for name, tier in self.names().items():
            item = _Item.from_parent(self, name=name)
            if tier:
                item.add_marker(tier)
            yield item

    def names(self) -> dict[str, str]:
        """Return the names of all items, with the tier where it is a check's; none of a claim that is not made."""
        from mlx_audit.audit.items import VERDICT
        from mlx_audit.evidence.codes import DECODE, check_tiers, claim_of

        tiers, family = check_tiers(), self.parent
        assert isinstance(family, Family)
        made = family.manifest.variants[self.name].claims.model_dump()
        asked = [c for c in tiers if claim_of(c) == DECODE or made[claim_of(c)] not in (None, "undecided")]
        codes = sorted((c for c in asked if tiers[c] in _TIERS), key=lambda c: (_TIERS.index(tiers[c]), c))
        return {**{code: tiers[code] for code in codes}, VERDICT: ""}


class _Named(pytest.Item):
    """An item whose headline is its family, variant and check."""

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return what the headline of a failure is made of."""
        return self.path, None, self.nodeid.partition("::")[2]


class _Item(_Named):
    """One check on all configurations of a variant, or the variant's verdict."""

    def runtest(self) -> None:
        """Report from the manifest's audit, which the first item makes."""
        from mlx_audit.audit.items import failure_of, note_of

        variant = self.listnames()[-2]
        audit = _audited(self.config, self.path)
        if audit.obstacle:
            pytest.fail(f"the audit could not be made: {audit.obstacle}", pytrace=False)
        results = audit.results.get(variant, [])
        failure = failure_of(self.name, results)
        listed = self._listed(self.name)
        if failure is None and listed is not None:
            pytest.fail(
                f"{listed.where}: it passes, so it is no known failure; remove the line", pytrace=False
            )
        if failure is None:
            if note := note_of(self.name, results):
                self.add_report_section("call", "mlx-audit", note)
            return
        if listed is not None:
            pytest.xfail(listed.reason)
        causes = {cause: self._listed(cause) for cause in sorted(failure.causes)}
        reasons = [
            f"rests on {cause}: {known.reason}" for cause, known in causes.items() if known is not None
        ]
        if len(reasons) == len(causes):
            pytest.xfail("; ".join(reasons))
        pytest.fail(failure.text, pytrace=False)

    def _listed(self, name: str) -> KnownFailure | None:
        """Return what is known of an item of this variant."""
        family, variant = self.listnames()[-3:-1]
        known = self.config.stash[_RUN].known[self.path.parent.resolve()]
        return known.get(f"{family}::{variant}::{name}")


class UnknownLine(_Named):
    """A line of known failures that names nothing."""

    def __init__(self, *, known: KnownFailure, items: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.known = known
        self.items = items

    def runtest(self) -> None:
        """Fail: whoever wrote the line believes that something is covered by it."""
        from mlx_audit.manifests.suggestions import did_you_mean

        fix = did_you_mean(self.known.item, self.items) or "remove the line"
        pytest.fail(f"{self.known.where}: there is no item {self.known.item}; fix: {fix}", pytrace=False)


def _audited(config: pytest.Config, path: Path) -> _Audit:
    """Return a manifest's audit; it is made once a process."""
    audits = config.stash[_RUN].audits
    if path not in audits:
        audits[path] = _audit(path, config.getoption("--mlx-audit-profile"))
    return audits[path]


def _audit(path: Path, profile: str) -> _Audit:
    from mlx_audit.audit.request import Options, Request
    from mlx_audit.audit.runner import run_audits
    from mlx_audit.manifests.problems import display
    from mlx_audit.models.target import resolve_target

    try:
        request = Request.of(resolve_target(display(path)), Options(profile=profile))
        (outcome,) = run_audits([request], jobs=1)
    except MlxAuditError as error:
        return _Audit(obstacle=str(error))
    if outcome.failed is not None:
        return _Audit(obstacle=outcome.failed.message)
    audit = _Audit()
    for result in outcome.results:
        audit.results.setdefault(result.variant, []).append(result)
    return audit


def _known(config: pytest.Config, folder: Path) -> Mapping[str, KnownFailure]:
    """Return what is known to fail of a folder's manifests."""
    from mlx_audit.audit.known_failures import read_known_failures

    given: Path | None = config.getoption("--mlx-audit-known")
    if given is not None:
        return read_known_failures(config.invocation_params.dir / given)
    file = folder / KNOWN_FAILURES
    return read_known_failures(file) if file.is_file() else {}


def _asked_for(config: pytest.Config) -> Iterator[Path]:
    """Yield the manifests that the command line names, themselves or by their folder."""
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        path = path.resolve() if path.is_dir() else _place(path)
        folder = path if path.is_dir() else path.parent
        if folder.name not in _NO_MANIFESTS:
            yield from filter(_is_manifest, sorted(path.glob("*.yaml")) if path.is_dir() else [path])


def _place(path: Path) -> Path:
    """Return a file's path by which it is known, however it was named; a link is a file where it lies."""
    return path.parent.resolve() / path.name


def _is_manifest(path: Path) -> bool:
    """Whether a file is plainly a manifest, be it a broken one: it has two of the keys that all of them have."""
    if path.suffix != ".yaml" or not path.is_file():
        return False
    try:
        with path.open("rb") as stream:
            return len(set(_KEY.findall(stream.read(_LOOKED_AT)))) >= 2
    except OSError:
        return False
