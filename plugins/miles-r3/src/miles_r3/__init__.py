"""Routing replay for Miles: the trainer sends every token to the experts that the engine chose for it."""
