"""Dynamic sampling of DAPO for Miles: groups whose answers all score the same are dropped and sampled again."""
