"""DeepSeek-V3 to -V4, Kimi K2, GLM-4.5 to 5 and MiniMax-M2 for the Megatron trainer."""
