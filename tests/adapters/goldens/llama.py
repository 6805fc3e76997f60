# Made by mlx-audit 0.1 from llama.yaml, sha256:9cfc530d6fd9d46a; do not edit: mlx-audit adapt llama --as module

from mlx_audit.adapters import allocate, entry
from mlx_audit.caches.linear import FixedCapacityKVCache
from mlx_audit.caches.rotating import FixedCapacityRotatingCache


class Adapter:
    def __init__(self, model):
        self.model = model

    # One entry for each cache of make_cache(), in the same order.
    def entries(self):
        args = self.model.args
        entries = []
        for i in range(len(args.layer_types)):
            if args.layer_types[i] == "sliding_attention":
                entries.append(
                    entry(
                        FixedCapacityRotatingCache, window=args.sliding_window, keep=0
                    )
                )
            else:
                entries.append(entry(FixedCapacityKVCache))
        return entries

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1):
        return allocate(self.model, self.entries(), max_tokens, batch_size)
