"""What a step's kernels must know about its requests, as arrays: builders and vLLM's pure helpers."""
