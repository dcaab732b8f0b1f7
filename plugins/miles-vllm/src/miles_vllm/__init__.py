"""The engine "vllm": servers of vLLM, and how they get the weights."""
