"""Which golden checkpoints the long tests of `make test-kernels` take: what others have, one of these has.

The rest runs with the slow tests; of each at least a whole prompt is held against transformers in every run.
"""

OFTEN = (
    *("bloom", "cohere2", "gemma3", "gpt_oss", "llama", "llama4", "mpt", "olmo2"),
    *("phi3_longrope", "phi3small", "qwen2_moe", "stablelm"),
)
