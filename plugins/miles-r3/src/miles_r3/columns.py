"""Names of the columns."""

ROUTES, PLACE = "routed_experts", "routed_rows"
"""The experts of each position, and the position's number among all of the rollout's."""
