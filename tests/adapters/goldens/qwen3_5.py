# Made by mlx-audit 0.1 from qwen3_5.yaml, sha256:a639598a2c69beab; do not edit: mlx-audit adapt qwen3_5 --as module

from mlx_audit.adapters import allocate, entry
from mlx_audit.caches.arrays import FixedCapacityArraysCache
from mlx_audit.caches.linear import FixedCapacityKVCache


class Adapter:
    def __init__(self, model):
        self.model = model

    # One entry for each cache of make_cache(), in the same order.
    def entries(self):
        args = self.model.language_model.args
        entries = []
        for i in range(args.num_hidden_layers):
            if (i + 1) % args.full_attention_interval == 0:
                entries.append(entry(FixedCapacityKVCache))
            else:
                entries.append(entry(FixedCapacityArraysCache, slots=2))
        return entries

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1):
        return allocate(self.model, self.entries(), max_tokens, batch_size)
