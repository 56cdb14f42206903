"""From files to a model: finding them, reading them, and putting tensors where they belong."""
