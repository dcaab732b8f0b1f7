"""DeepSeek-V3, GLM-4.5 and MiniMax-M2 for the Megatron trainer."""
