"""What a TARGET is, and how its model is built: tiny, full-size without weights, or from a checkpoint."""
