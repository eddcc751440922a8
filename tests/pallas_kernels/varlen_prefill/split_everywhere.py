"""Force splits in tests; by default short query tiles are not split."""

import jax.numpy as jnp

from pallas_kernels.varlen_prefill import schedule, sizes

MOST = 3  # splits of a tile


def split_every_tile(monkeypatch):
    """Split each query tile, where possible, into one split per key tile, up to MOST.

    Returns:
        A list that gets an entry for each schedule that is made.
    """
    schedules = []

    def num_splits(kv_tiles, is_live, **options):
        schedules.append(options)
        return jnp.where(is_live, jnp.clip(kv_tiles, 1, MOST), 0)

    monkeypatch.setattr(schedule, "choose_num_splits", num_splits)
    monkeypatch.setattr(schedule, "SPLIT_OUTPUTS_PER_CTA", 40)
    monkeypatch.setattr(sizes, "MIN_KV_TO_SPLIT", 0)
    return schedules
