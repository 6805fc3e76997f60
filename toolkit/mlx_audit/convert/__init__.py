"""Conversion of checkpoints to MLX folders that are audited with their own weights, and stamped."""
