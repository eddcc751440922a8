"""Sparsity patterns compared on the tiny model: `python -m examples.sparsity --out DIR`."""
