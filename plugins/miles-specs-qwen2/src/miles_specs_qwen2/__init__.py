"""Qwen2, Qwen2.5, Qwen2.5-VL, Qwen2-MoE and MiMo for the Megatron trainer."""
