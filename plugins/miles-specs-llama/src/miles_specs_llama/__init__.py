"""Llama 2 and 3 and Mistral for the Megatron trainer."""
