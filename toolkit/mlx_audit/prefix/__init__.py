"""Prefix reuse: an index of token prefixes, whole-stack snapshots, and the rules by which they are restored."""
