"""`mlx-audit adapt --as patch`: the model's own source, mended, and audited before it is offered."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_audit.cli import _choices, _console, _files
from mlx_audit.errors import MlxAuditError, TargetError

if TYPE_CHECKING:
    from mlx_audit.audit.patches import Patch
    from mlx_audit.audit.request import Options
    from mlx_audit.audit.runner import Outcome
    from mlx_audit.models.target import Target


def adapt_as_patch(
    target: str,
    config: Path | None,
    *,
    check: Path | None = None,
    output: Path | None = None,
    force: bool = False,
    profile: str = "quick",
    json: str | None = None,
    timeout: float = 600.0,
) -> int:
    """Write a unified diff of the model's source: exit 0 where the patched model is capable, 1 where it is not.

    Args:
        target, config: As `run` takes them.
        check: A diff to compare with, in place of an audit.
        output: Where the diff goes; stdout by default.
        force: Whether it may replace a file that is no patch.
        profile: How much the audit of the patched model does.
        json: Where the results of the patched model go.
        timeout: Seconds that an audit may take.
    """
    from mlx_audit.audit.patches import make_patch, source_of
    from mlx_audit.audit.request import Options
    from mlx_audit.checks.profiles import PROFILES
    from mlx_audit.models.target import resolve_target

    if output is None and json == "-":
        raise MlxAuditError("both the patch and the results would go to stdout", fix="name a file: -o FILE")
    _choices.one_of("--profile", profile, list(PROFILES))
    _choices.seconds("--timeout", timeout)
    _choices.require_temporary_folder()
    resolved = resolve_target(_choices.target(target), config)
    read = [*_files.inputs(resolved, config), source_of(resolved)]
    if output is not None:
        _files.patch("-o", output, read, force=force)
    if json not in (None, "-"):
        _files.results("--json", json, read)
    before = _audited(resolved, config, Options(tiers=["static"]), timeout)
    patch = make_patch(resolved, before.results)
    if check is not None:
        return _check(patch, check)
    _console.note("as it is:")
    _show_briefly(before)
    if not patch.sources:
        return _nothing_to_patch(before, target, config)
    with patch.written() as overlay:
        after = _audited(resolved, config, Options(profile=profile), timeout, overlay)
    _console.note(f"patched by {', '.join(patch.applied)}:")
    _show(after)
    _show_against_unpatched(after)
    if json is not None:
        from mlx_audit.cli.run import write_json

        write_json(json, [after])
    return _offer(patch, after, output)


def _nothing_to_patch(before: Outcome, target: str, config: Path | None) -> int:
    """Say so: 0 where reading found nothing in the way, 1 where no codemod mends what it found."""
    if _show_obstacles(before):
        return 1
    given = "" if config is None else f" --config {config}"
    _console.note(f"nothing to patch here; the verdict: mlx-audit run {target}{given}")
    return 0


def _show_obstacles(outcome: Outcome) -> bool:
    """Name every line that no codemod mends, and say what to do; False where there is none."""
    from mlx_audit.audit.patches import obstacles

    found = obstacles(outcome.results)
    for obstacle in found:
        _console.note(f"no codemod mends {obstacle}")
    if not found:
        return False
    explain = ", ".join(f"mlx-audit explain {code}" for code in sorted({item.code for item in found}))
    _console.note(f"mend {'it' if len(found) == 1 else 'them'} in the model's source; how: {explain}")
    return True


def _audited(
    target: Target,
    config: Path | None,
    options: Options,
    timeout: float,
    overlay: dict[str, Path] | None = None,
) -> Outcome:
    from mlx_audit.audit.request import Request
    from mlx_audit.audit.runner import run_audits
    from mlx_audit.cli._progress import progress

    request = Request.of(target, options, config).model_copy(update={"overlay": overlay or {}})
    with progress() as listener:
        outcome = run_audits([request], timeout=timeout, listener=listener)[0]
    if outcome.failed is not None:
        refused = TargetError(outcome.failed.message)
        refused.exit_code = outcome.failed.exit_code
        raise refused
    return outcome


def _show(outcome: Outcome) -> None:
    from mlx_audit.cli import _render

    _render.show_outcomes(_console.stderr(), [outcome], partial=False)


def _show_briefly(outcome: Outcome) -> None:
    """One line a result: what failed is told in full once, below."""
    from mlx_audit.cli import _render

    for result in outcome.results:
        _console.note(_render.brief_line(result))


def _show_against_unpatched(outcome: Outcome) -> None:
    """Say how the patched model's eager logits stand to the unpatched model's."""
    for result in outcome.results:
        for check in result.checks:
            if check.code != "PAR008" or check.status != "pass":
                continue
            figures = check.figures
            equal = "bit-equal to" if figures["bit_equal"] else "equal, but for the order of sums, to"
            most = "" if figures["bit_equal"] else f" (largest difference {figures['max_difference']:.3g})"
            _console.note(
                f"{result.variant} {result.configuration}: eager logits are {equal} the unpatched ones{most}"
            )
            for how, what in figures["upstream"].items():
                _console.note(f"    the unpatched model, {how}, {what}")


def _offer(patch: Patch, after: Outcome, output: Path | None) -> int:
    """Write the diff where every configuration is capable; otherwise say what stands in the way."""
    from mlx_audit.audit.exit_codes import CLAIM_FAILED, HOLDS, UNDECIDED
    from mlx_audit.evidence.records import write_atomically

    verdicts = {result.verdict for result in after.results}
    if not verdicts <= {"capable", "limited"}:
        _console.note("the patch is not offered: the patched model is not proved")
        _show_obstacles(after)
        return CLAIM_FAILED if "not-capable" in verdicts else UNDECIDED
    if output is None:
        print(patch.diff, end="")
        return HOLDS
    try:
        write_atomically(output.absolute(), patch.diff)
    except OSError as error:
        raise MlxAuditError("the patch cannot be written", where=str(output), found=error.strerror) from error
    own = patch.target.file is not None
    folder = str(patch.sources[0].path.parent) if own else "the folder that holds mlx_lm/"
    _console.note(f"wrote {output}; apply it in {folder}: patch -p1 < {output.name}")
    return HOLDS


def _check(patch: Patch, file: Path) -> int:
    """Compare with a diff that was written before: 0 where it is the same, 1 where it is not."""
    try:
        written = _files.compared(file).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise MlxAuditError("the patch cannot be read", where=str(file), found=error) from error
    if written == patch.diff:
        _console.note(f"{file} is up to date")
        return 0
    if not patch.diff:
        _console.note(f"{file} is applied already, or not needed: there is nothing to patch")
        return 1
    _console.note(f"{file} is out of date")
    lines = difflib.unified_diff(written.splitlines(), patch.diff.splitlines(), str(file), "now", lineterm="")
    print("\n".join(lines), file=sys.stderr)
    return 1
