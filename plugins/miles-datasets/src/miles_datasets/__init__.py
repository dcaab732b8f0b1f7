"""Prompts and evaluation sets from Parquet, Arrow, CSV and JSON files, folders and the Hugging Face cache."""
