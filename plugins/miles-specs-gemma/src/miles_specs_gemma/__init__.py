"""Gemma 2 and the text models of Gemma 3 for the Megatron trainer."""
