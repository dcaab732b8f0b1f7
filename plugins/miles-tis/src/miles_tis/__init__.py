"""Correction of the gap between engine and trainer: truncated and masked importance sampling, rejection, OPSM."""
