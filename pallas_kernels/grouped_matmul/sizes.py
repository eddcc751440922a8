"""Static sizes of grouped_matmul.

Chosen for few bytes of both operands a product and no spilled registers, not by measurement yet:
`python -m benchmarks experts` has the rows.
"""

TILE_ROWS = 128  # rows of a thread block, half of them each of its two warpgroups that multiply
TILE_INPUTS = 64  # of both operands, a stage: a row of the swizzle
TILES_OUTPUTS = (256, 192, 128, 64)  # columns of a thread block, the widest that divides the outputs
SHARED_MEMORY = 225 * 1024  # bytes a thread block may have


def tile_outputs(outputs: int) -> int:
    """Columns of a thread block."""
    return next(tile for tile in TILES_OUTPUTS if outputs % tile == 0)


def num_stages(tile: int, inputs: int) -> int:
    """Stages of both operands beside the tile of results, no more than there is to load."""
    stage, results = 2 * (TILE_ROWS + tile) * TILE_INPUTS, 2 * TILE_ROWS * tile
    return min((SHARED_MEMORY - results) // stage, inputs // TILE_INPUTS)
