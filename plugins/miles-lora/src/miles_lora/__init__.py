"""Low-rank adapters for Miles (Hu et al., arXiv:2106.09685)."""
