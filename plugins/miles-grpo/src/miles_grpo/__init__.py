"""Group-relative policy optimization for Miles: the advantage estimator "grpo"."""
