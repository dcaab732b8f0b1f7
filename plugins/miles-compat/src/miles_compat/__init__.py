"""Functions that a launch script of Miles or slime names by path, called by the hooks of Miles."""
