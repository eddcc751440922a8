"""What a step's kernels must know about its requests, as arrays: its builders."""
