"""The GPUs that sizes were measured for."""

NUM_SMS = 132  # H100 SXM, H200
