"""Group sequence policy optimization for Miles: an advantage estimator and a policy loss, both named "gspo"."""
