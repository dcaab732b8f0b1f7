"""Dense GLM-4 for the Megatron trainer."""
