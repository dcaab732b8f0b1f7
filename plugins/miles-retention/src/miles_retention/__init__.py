"""Which checkpoints of a Miles run are kept."""
