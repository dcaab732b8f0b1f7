"""Qwen2, Qwen2.5, Qwen2-MoE and MiMo for the Megatron trainer."""
