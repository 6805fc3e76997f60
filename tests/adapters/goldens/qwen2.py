# Made by mlx-audit 0.1 from qwen2.yaml, sha256:7d2859e2efc9d9f9; do not edit: mlx-audit adapt qwen2 --as module

from mlx_audit.adapters import allocate, entry
from mlx_audit.caches.linear import FixedCapacityKVCache


class Adapter:
    def __init__(self, model):
        self.model = model

    # One entry for each cache of make_cache(), in the same order.
    def entries(self):
        args = self.model.args
        entries = []
        for _ in range(args.num_hidden_layers):
            entries.append(entry(FixedCapacityKVCache))
        return entries

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1):
        return allocate(self.model, self.entries(), max_tokens, batch_size)
