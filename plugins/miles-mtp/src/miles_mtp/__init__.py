"""Multi-token prediction for Miles: keep the layers that draft for speculative decoding, and train them."""
