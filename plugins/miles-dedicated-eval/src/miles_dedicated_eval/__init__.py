"""Evaluations on engines of their own, while training goes on."""
