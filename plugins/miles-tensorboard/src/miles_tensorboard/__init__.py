"""Metrics of a Miles run as TensorBoard event files."""
