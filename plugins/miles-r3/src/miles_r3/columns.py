"""The columns' names, and what stands for no expert."""

ROUTES, PLACE = "routed_experts", "routed_rows"
"""The experts of each position, and the position's number among all of the rollout's."""
BYTE_NONE = 255
"""No expert, where routes are bytes; -1 otherwise. Models of more experts have no number left for it."""
