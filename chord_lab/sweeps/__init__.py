"""Sweeps: which candidates, in which order, and which of them won."""
