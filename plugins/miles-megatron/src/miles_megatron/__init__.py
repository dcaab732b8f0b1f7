"""The trainer on Megatron-core: layouts, steps, checkpoints, weights from and to Hugging Face names."""
