# Made by mlx-audit 0.1 from nemotron_h.yaml, sha256:1cee5335d956650d; do not edit: mlx-audit adapt nemotron_h --as module

from mlx_audit.adapters import allocate, entry
from mlx_audit.caches.arrays import FixedCapacityArraysCache
from mlx_audit.caches.linear import FixedCapacityKVCache


class Adapter:
    def __init__(self, model):
        self.model = model

    # One entry for each cache of make_cache(), in the same order.
    def entries(self):
        args = self.model.args
        entries = []
        for i in range(len(args.hybrid_override_pattern)):
            if args.hybrid_override_pattern[i] == "M":
                entries.append(entry(FixedCapacityArraysCache, slots=2))
            elif args.hybrid_override_pattern[i] == "*":
                entries.append(entry(FixedCapacityKVCache))
        return entries

    def new_fixed_capacity_cache(self, max_tokens: int, *, batch_size: int = 1):
        return allocate(self.model, self.entries(), max_tokens, batch_size)
