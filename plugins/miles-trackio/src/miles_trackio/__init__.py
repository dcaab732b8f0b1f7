"""Metrics, evaluations and sampled answers of a Miles run in Trackio."""
