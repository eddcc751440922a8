"""Each kernel's entry point with its required arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.add_norm import add_norm
from pallas_kernels.block_scores import block_scores, select_top_blocks, top_p_threshold
from pallas_kernels.cache_read import cache_read
from pallas_kernels.cache_write import cache_write
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.qkv_write import qkv_write
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_backward import varlen_backward
from pallas_kernels.varlen_prefill import varlen_prefill


class Entry(NamedTuple):
    """An entry point of a kernel.

    Attributes:
        run: The function.
        floats: Differentiable arguments, by name.
        ints: Int arrays, by name.
        static: Other arguments.
        fix: Alternative that the error of a derivative names.
    """

    run: Callable[..., Any]
    floats: dict[str, Any]
    ints: dict[str, Any]
    static: dict[str, Any]
    fix: str


def half(*shape):
    return jnp.ones(shape, jnp.bfloat16)


def ints(*numbers):
    return jnp.asarray(numbers, jnp.int32)


SCORE = {"score": Score(scale=0.1)}
QUERY, KEYS, CACHE = half(2, 4, 64), half(2, 2, 64), half(2, 16, 2, 64)
PACKED = {"query": QUERY, "key": KEYS, "value": KEYS}
CACHES = {"k_cache": CACHE, "v_cache": CACHE}
PAGES = {"block_table": ints([0], [1]), "seq_lens": ints(3, 9)}
BOUNDS = {"query_start_loc": ints(0, 1, 2), "seq_lens": ints(1, 1), "kv_start_loc": ints(0, 1)}
GRADS = {"out": QUERY, "lse": jnp.ones((4, 2)), "grad_out": QUERY}
SLOTS = {"slot_mapping": ints(3, -1)}
CHOICE = {"block_size": 16, "num_selected": 1, "num_recent": 0}
XLA = "implementation='xla'"
ENTRIES = {
    entry.run.__name__: entry
    for entry in (
        Entry(paged_decode, {"query": QUERY} | CACHES, PAGES, SCORE, "PackedKV"),
        Entry(varlen_prefill, PACKED, BOUNDS, SCORE, "jattn.attention"),
        Entry(varlen_backward, PACKED | GRADS, BOUNDS, SCORE, "implementation='reference'"),
        Entry(cache_write, {"key": KEYS, "value": KEYS} | CACHES, SLOTS, {}, XLA),
        Entry(qkv_write, {"qkv": half(2, 2, 4, 64)} | CACHES, SLOTS, {}, XLA),
        Entry(
            cache_read, {"cache": CACHE}, PAGES | {"first_keys": ints(0, 0)}, {"dtype": jnp.bfloat16}, "numpy"
        ),
        Entry(add_norm, {"x": half(2, 128), "sublayer_out": half(2, 128), "weight": half(128)}, {}, {}, XLA),
        Entry(
            grouped_matmul,
            {"x": half(128, 128), "weights": half(1, 128, 128)},
            {"group_of_tile": ints(0)},
            {},
            XLA,
        ),
        Entry(
            block_scores,
            dict.fromkeys(("query", "low", "high"), half(2, 8, 64)),
            PAGES,
            {"block_size": 16},
            "jattn",
        ),
        Entry(
            select_top_blocks,
            {"scores": jnp.ones((2, 2, 1))},
            {"seq_lens": PAGES["seq_lens"]},
            CHOICE,
            "top_k",
        ),
        Entry(top_p_threshold, {"scores": jnp.ones((2, 8))}, {}, {"mass": 0.5}, "softmax"),
    )
}
