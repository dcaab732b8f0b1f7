"""On-policy distillation for Miles: the reverse KL to a teacher as an advantage, alone or on top of another."""
