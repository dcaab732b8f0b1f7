"""Qwen3-Next, Qwen3.5, Qwen3.6 and Ling 3.0 for the Megatron trainer."""
