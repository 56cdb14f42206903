"""LoRA adapters: reading them, and keeping those of a loaded model."""
