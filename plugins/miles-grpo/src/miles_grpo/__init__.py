"""Group-relative policy optimization for Miles: an advantage estimator and a clipped policy loss, both named "grpo"."""
