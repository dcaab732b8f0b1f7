"""Partial rollouts for Miles: answers that were called back keep their tokens and go on later."""
