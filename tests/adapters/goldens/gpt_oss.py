# Made by mlx-audit 0.1 from gpt_oss.yaml, sha256:6cdba84144ded443; do not edit: mlx-audit adapt gpt_oss --as module

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
        for i in range(args.num_hidden_layers):
            if (
                args.layer_types is None
                and i % 2 == 1
                or args.layer_types is not None
                and args.layer_types[i] == "full_attention"
            ):
                entries.append(entry(FixedCapacityKVCache))
            else:
                entries.append(
                    entry(
                        FixedCapacityRotatingCache, window=args.sliding_window, keep=0
                    )
                )
        return entries

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1):
        return allocate(self.model, self.entries(), max_tokens, batch_size)
