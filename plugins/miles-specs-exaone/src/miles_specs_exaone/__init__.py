"""EXAONE 4 for the Megatron trainer."""
