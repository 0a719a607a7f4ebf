"""Tensors and processes: everything that touches torch or Ray."""
