"""Sparse patterns trained from the first step on, and decoded with the paged cache."""
