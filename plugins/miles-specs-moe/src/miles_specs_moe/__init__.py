"""DeepSeek-V3 to -V4, Kimi K2, GLM-4.5 to 5, MiniMax-M2 and Hy3 for the Megatron trainer."""
