"""Rewards from an HTTP service for Miles."""
