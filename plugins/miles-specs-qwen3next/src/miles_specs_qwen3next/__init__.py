"""Qwen3-Next for the Megatron trainer."""
