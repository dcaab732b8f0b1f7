"""The SGLang engine: real servers over HTTP, what they are started with, and what travels to them."""
