"""A file of prompts in, a file of answers out, taken up again after any interruption."""
