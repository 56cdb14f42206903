"""Tensor maths of weights: how a matrix is stored and multiplied. No module trees."""
