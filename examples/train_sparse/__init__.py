"""Training with sparse attention patterns from the first step on, and decoding with the paged cache."""
