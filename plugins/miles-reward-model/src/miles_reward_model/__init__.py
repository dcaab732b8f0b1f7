"""Rewards from a reward model that a Miles run hosts on SGLang servers of its own."""
