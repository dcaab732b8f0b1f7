"""Qwen2 and Qwen2.5 for the Megatron trainer."""
