"""Nemotron 3 and Nemotron-H for the Megatron trainer."""
