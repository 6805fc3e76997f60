"""The whole way: look at SRC and DST, make, audit, stamp, and give the folder its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_audit.audit.planted import PLANT, planted_name
from mlx_audit.audit.request import Options, Request
from mlx_audit.audit.runner import Outcome
from mlx_audit.convert.model_card import write_card
from mlx_audit.convert.options import ConvertOptions
from mlx_audit.convert.order import ConversionFailed, Order, convert_in_child
from mlx_audit.convert.place import Place, PlaceError, publish, require_place, require_room, stage
from mlx_audit.convert.source import KEPT, Source, resolve_source
from mlx_audit.convert.stamping import make_stamp, renamed
from mlx_audit.errors import MlxAuditError
from mlx_audit.evidence.file_hashes import Hashed, hash_files, state_of
from mlx_audit.evidence.stamps import Stamp, model_files, write_stamp
from mlx_audit.models.target import resolve_target

Audit = Callable[[Request], Outcome]
HashFiles = Callable[[Path, list[str]], dict[str, Hashed]]


@dataclass(frozen=True)
class Plan:
    """A conversion that was looked at, and can be begun.

    Attributes:
        text: DST as the user typed it.
    """

    source: Source
    place: Place
    text: str
    options: ConvertOptions


@dataclass(frozen=True)
class Conversion:
    """What was made.

    Attributes:
        folder: DST.
        outcome: Of the audit.
        stamp: As it was written.
        remarks: What else there is to say: files left out, what could not be done to the model card.
    """

    folder: Path
    outcome: Outcome
    stamp: Stamp
    remarks: list[str]


def plan_conversion(source: str, destination: str, options: ConvertOptions) -> Plan:
    """Look at SRC, DST and the options; nothing is made, nor loaded.

    Raises:
        MlxAuditError: says what cannot be used.
    """
    if fault := planted_name():
        raise MlxAuditError(
            "no stamp is made while a fault is planted", where=PLANT, found=fault, fix=f"unset {PLANT}"
        )
    options.require_sound()
    found = resolve_source(source)
    place = require_place(found, destination)
    if place.in_place and options.changes_weights:
        raise MlxAuditError(
            "weights are never rewritten for a stamp",
            where=f"DST {destination}",
            found="DST is SRC, with options that change weights",
            fix="name another DST",
        )
    if options.quantize and found.kind != "gguf" and found.is_quantized:
        raise MlxAuditError(
            "the source is quantized already",
            where=f"{source}/config.json: quantization",
            fix="leave --quantize out; or --dequantize it first, into a folder of its own",
        )
    if not place.in_place:
        require_room(place, found.least_bytes(options))
    return Plan(found, place, destination, options)


def convert(plan: Plan, audit_options: Options, audit: Audit, hashed: HashFiles = hash_files) -> Conversion:
    """Convert, audit and stamp; DST has its name only when all is done.

    Args:
        plan: What to do.
        audit_options: What `run` is told.
        audit: Audits one target.
        hashed: Reads files; one that shows how far it is.

    Raises:
        MlxAuditError: nothing was left behind.
    """
    if plan.place.in_place:
        return _stamp_in_place(plan, audit_options, audit, hashed)
    source, place = plan.source, plan.place
    try:
        with stage(place.path) as folder:
            made = folder / "made"
            remarks = _make(plan, folder, made)
            outcome, stamp = _audited(plan, made, audit_options, audit, hashed)
            remarks += _written(stamp, made)
            publish(made, place)
    except OSError as error:
        raise ConversionFailed(
            "the folder cannot be written", where=plan.text, found=error.strerror
        ) from error
    left = [f"left out: {name}" for name in source.left_out]
    return Conversion(place.path, outcome, stamp, [*left, *remarks])


def _make(plan: Plan, folder: Path, made: Path) -> list[str]:
    """Make the MLX folder, and return what there is to say."""
    source = plan.source
    if source.kind == "gguf":
        order = Order(text=source.text, work="gguf", source=source.path, made=made, options=plan.options)
        return convert_in_child(order)
    if source.needs_copy_only and not plan.options.changes_weights:
        made.mkdir()
        for name, path in source.files.items():
            shutil.copyfile(path, made / name)
        return _checked(source, made, plan.options)
    # A folder of links: mlx-lm would copy code, and read whatever else lies in SRC.
    clean = folder / "source"
    clean.mkdir()
    for name, path in source.files.items():
        (clean / name).symlink_to(path)
    order = Order(text=source.text, work="convert", source=clean, made=made, options=plan.options)
    notes = convert_in_child(order)
    for name in KEPT & source.files.keys():
        shutil.copyfile(source.files[name], made / name)
    return notes


def _checked(source: Source, folder: Path, options: ConvertOptions) -> list[str]:
    return convert_in_child(Order(text=source.text, work="load", source=folder, made=folder, options=options))


def _stamp_in_place(plan: Plan, audit_options: Options, audit: Audit, hashed: HashFiles) -> Conversion:
    folder = plan.place.path
    remarks = _checked(plan.source, folder, plan.options)
    outcome, stamp = _audited(plan, folder, audit_options, audit, hashed)
    try:
        remarks += _written(stamp, folder)
    except OSError as error:
        raise PlaceError("the model card cannot be written", where=plan.text, found=error.strerror) from error
    return Conversion(folder, outcome, stamp, remarks)


def _audited(
    plan: Plan, folder: Path, options: Options, audit: Audit, hashed: HashFiles
) -> tuple[Outcome, Stamp]:
    """Audit a folder as `run DST` does, and return its stamp; what is stamped is what was audited."""
    target = replace(resolve_target(str(folder)), text=plan.text, config_name=plan.place.path.name)
    before = _states(folder), hashed(folder, model_files(folder))
    outcome = renamed(audit(Request.of(target, options)), folder, str(plan.place.path))
    stamp = make_stamp(outcome, before[1])
    if (_states(folder), hashed(folder, model_files(folder))) != before:
        raise ConversionFailed("files changed while they were audited", where=plan.text, fix="try again")
    return outcome, stamp


def _states(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return, by name, numbers that also tell of a file that was another one meanwhile and is itself again."""
    found = {}
    for name in model_files(folder):
        link = (folder / name).lstat()
        found[name] = (*state_of(folder / name), link.st_ino, link.st_ctime_ns)
    return found


def _written(stamp: Stamp, folder: Path) -> list[str]:
    write_stamp(stamp, folder)
    return write_card(stamp, folder)
