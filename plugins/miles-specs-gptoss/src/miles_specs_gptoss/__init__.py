"""gpt-oss for the Megatron trainer."""
