"""For tests of what trains with Megatron: real ranks, parity of model families, resharding. Needs pytest."""
