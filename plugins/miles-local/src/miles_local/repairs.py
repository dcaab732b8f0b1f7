"""What a release of transformers gets wrong in a model that this project computes, put right where this is imported.

A repair has a test that fails once a release no longer needs it.
"""

from __future__ import annotations

from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

# Llama 4's forward in 5.24.0 passes on what its text model's output says of images; that has nothing of the name.
for _output in (MoeCausalLMOutputWithPast, MoeModelOutputWithPast):
    if not hasattr(_output, "image_outputs"):
        _output.image_outputs = None
