"""Proximal policy optimization for Miles: the estimator "ppo" and the critic that it needs."""
