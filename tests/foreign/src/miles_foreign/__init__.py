"""An engine, a trainer and a weight sync of transformers and PyTorch alone."""
