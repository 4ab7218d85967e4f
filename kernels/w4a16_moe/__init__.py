"""W4A16 mixture-of-experts GEMMs: INT4 weights (group-32, bf16 scales), bf16 activations, one kernel per schedule."""
