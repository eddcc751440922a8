"""Comparison of sparsity patterns on the tiny model: `python -m examples.sparsity --out DIR`."""
