"""Gemma 2 and the text models of Gemma 3 and 4 for the Megatron trainer."""
