"""The stacks that faults are planted in by default: together they have every kind of cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_audit.models.target import Target, resolve_target

_HERE = Path(__file__).parent
_LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Topology:
    """A stack of caches under a small model.

    Attributes:
        name: As in the kill matrix.
        traits: What the stack has, for `Fault.needs`: kinds of cache (`linear`, `rotating`, `arrays`, …) and
            `slots` (some cache has slots), `ring` (some cache forgets), `keep` (some ring keeps its first tokens),
            `only_linear`, `only_rings`, `trims` (every cache can take tokens back), `ragged` (rows of different length
            may share it), `alike` (the first two caches have one form), `rope`, `manifest`.
        family, variant: Whose tiny model it is; or
        file, config: a model file and its configuration.
        unsound: Checks that fail on the healthy stack, with the reason: faults that are for them are not planted here.
    """

    name: str
    traits: frozenset[str]
    family: str = ""
    variant: str = ""
    file: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    unsound: Mapping[str, str] = field(default_factory=dict)

    def target(self) -> Target:
        """Return what to audit: the family, of which `variant` is meant, or the model file with its configuration."""
        if self.file is None:
            return resolve_target(self.family)
        return Target(
            self.name, "file", self.name, None, file=self.file, config=dict(self.config), config_name="tiny"
        )


def _of_family(name: str, family: str, variant: str, traits: str) -> Topology:
    return Topology(name, frozenset([*traits.split(), "manifest"]), family, variant)


def _of_file(name: str, traits: str, unsound: Mapping[str, str] | None = None) -> Topology:
    return Topology(
        name, frozenset(traits.split()), file=_HERE / f"{name}.py", config=_LLAMA, unsound=unsound or {}
    )


_HIDDEN = "inside a chunk, mlx-lm hides what a ring keeps, and shows it to single tokens"


TOPOLOGIES = (
    _of_family("linear", "llama", "full", "linear slots only_linear trims ragged alike rope"),
    _of_family("rotating", "llama", "sliding", "linear rotating slots ring ragged rope"),
    _of_file(
        "keeping",
        "rotating slots ring keep only_rings alike rope",
        dict.fromkeys(("PAR003", "PAR004", "PAR007"), _HIDDEN),
    ),
    _of_file("chunked", "chunked slots ring only_rings ragged alike rope"),
    _of_file("quantized", "quantized slots trims ragged alike rope"),
    _of_family("arrays", "mamba2", "recurrent", "arrays ragged alike"),
    _of_family("hybrid", "qwen3_5", "hybrid", "arrays linear slots ragged rope"),
    _of_family("composite", "falcon_h1", "parallel", "composite arrays linear slots ragged alike rope"),
    _of_family("composite of slots", "deepseek_v32", "sparse", "composite linear slots ragged alike rope"),
)
"""In the order in which a fault looks for the one that it is most exposed in."""
