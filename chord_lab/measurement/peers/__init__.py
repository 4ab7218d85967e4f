"""Peers: other implementations measured in the same run, on the same weights, activations and routing."""
