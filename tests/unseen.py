"""A model file that nobody has seen: mlx-lm's llama with a window in every third layer, and positions made by NumPy."""

from __future__ import annotations

import json
from pathlib import Path

from model_files import write_model
from tiny_models import config_of

POSITIONS = "np.arange(cache[0].offset, cache[0].offset + h.shape[1])"
"""What cannot be traced."""

_HEAD = (
    "import mlx.core as mx\nimport mlx.nn as nn\n",
    "import mlx.core as mx\nimport mlx.nn as nn\nimport numpy as np\n",
)
_THIRDS = (
    """\
            TransformerBlock(args=args, use_sliding=layer_type == "sliding_attention")
            for layer_type in self.layer_types
""",
    """\
            TransformerBlock(args=args, use_sliding=(i + 1) % 3 == 0)
            for i in range(args.num_hidden_layers)
""",
)
_TABLE = (
    "        self.fa_idx",
    "        self.embed_positions = nn.Embedding(args.max_position_embeddings, args.hidden_size)\n        self.fa_idx",
)
_USES = {
    "embedding": f"        h = h + self.embed_positions(mx.array({POSITIONS}))\n",
    "scale": (
        f"        positions = mx.array({POSITIONS})\n"
        "        h = h * (1 + 0.1 * mx.log(1 + positions / 8))[..., None].astype(h.dtype)\n"
    ),
}
KINDS = tuple(_USES)
_MASKS = "        fa_mask = create_attention_mask(h, cache[self.fa_idx])\n"


def write_unseen(folder: Path, kind: str = "embedding", name: str = "unseen") -> tuple[Path, Path]:
    """Write the file, and a configuration of a real size beside it; return both paths."""
    changes = [_HEAD, _THIRDS, (_MASKS, _USES[kind] + _MASKS)]
    if kind == "embedding":
        changes.append(_TABLE)
    config = {
        **config_of("llama"),
        "model_type": name,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 9,
        "vocab_size": 1024,
        "sliding_window": 512,
        "max_position_embeddings": 2048,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return write_model(folder, name, *changes), path
