"""Flags of Miles and slime."""
