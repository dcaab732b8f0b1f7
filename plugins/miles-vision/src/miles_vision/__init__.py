"""Prompts with images."""
