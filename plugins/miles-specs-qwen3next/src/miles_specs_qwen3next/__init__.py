"""Qwen3-Next, Qwen3.5 and Qwen3.6 for the Megatron trainer."""
