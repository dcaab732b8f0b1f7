"""Llama 2 to 4, Mistral, SmolLM3, Granite, Phi-3 and 4, and OLMo 2 and 3 for the Megatron trainer."""
