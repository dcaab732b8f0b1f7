"""REINFORCE for Miles: the estimators "reinforce_plus_plus", "reinforce_plus_plus_baseline" and "rloo"."""
