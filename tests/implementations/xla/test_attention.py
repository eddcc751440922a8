"""Query tiles of the prefill region."""

import jax
import numpy as np

from jattn import Bucket, build_batch_metadata
from jattn.implementations.xla import prefill_tiles

BUCKET = Bucket(max_prefills=4, max_prefill_tokens=256, max_blocks=16)


def test_prefill_tiles_have_one_request_each_and_are_computed_without_a_loop():
    metadata = build_batch_metadata(
        [70, 1, 128], [100, 50, 128], np.ones((3, 16), np.int32), block_size=16, bucket=BUCKET
    )
    compiled = jax.jit(prefill_tiles).lower(metadata).compile()
    tiles = compiled(metadata)
    num = int((tiles.lens > 0).sum())
    assert tiles.rows[:num].tolist() == [0, 0, 1, 2, 2]
    assert tiles.lens[:num].tolist() == [64, 6, 1, 64, 64]
    assert tiles.starts[:num].tolist() == [0, 64, 70, 71, 135]
    assert " while(" not in compiled.as_text()
