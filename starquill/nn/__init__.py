"""The pieces that model files are made of."""
