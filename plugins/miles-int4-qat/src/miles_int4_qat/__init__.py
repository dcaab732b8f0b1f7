"""Quantisation-aware training to INT4 for Miles: what the engine computes with is what the trainer computes with."""
