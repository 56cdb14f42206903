"""Which layer lives where, at how many bits: pure functions over sizes, no tensors."""
