"""Splits where a test wants them: short tiles of queries are left whole otherwise."""

import jax.numpy as jnp

from pallas_kernels.varlen_prefill import schedule, sizes, splits

MOST = 3  # splits of a tile


def cut_everywhere(monkeypatch):
    """Cuts each tile of queries, where that may be, into as many splits as it has tiles of keys, or MOST.

    Returns: a list that grows with every schedule made so.
    """
    made = []

    def num_splits(kv_tiles, is_live, **how):
        made.append(how)
        return jnp.where(is_live, jnp.clip(kv_tiles, 1, MOST), 0)

    monkeypatch.setattr(schedule, "choose_num_splits", num_splits)
    monkeypatch.setattr(splits, "SPLIT_OUTPUTS_PER_CTA", 40)
    monkeypatch.setattr(sizes, "MIN_KV_TO_SPLIT", 0)
    return made
