"""Supervised fine-tuning in Miles: the dataset's own answers take the place of sampled ones."""
