"""SAPO for Miles: an advantage estimator and a policy loss, both named "sapo"."""
