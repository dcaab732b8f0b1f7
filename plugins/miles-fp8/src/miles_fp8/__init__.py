"""FP8 for Miles: training in it, engines with its weights, and checkpoints of them."""
