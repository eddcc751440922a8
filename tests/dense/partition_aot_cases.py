"""Training steps under plain jit on two H200s, to compile ahead of time, by the sharded axis and the
layer's features.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks

TEXTS, TOKENS, Q_HEADS, KV_HEADS = 2, 256, 8, 2
BY_TEXTS, BY_HEADS = P("x"), P(None, None, "x")
LAYERS = {
    "plain": {},
    "sinks": {"sinks": np.linspace(-1.0, 1.0, Q_HEADS, dtype=np.float32), "window": (99, 0)},
    "slopes": {"alibi_slopes": np.linspace(0.1, 0.3, Q_HEADS, dtype=np.float32), "soft_cap": 9.0},
    "segments": {"segment_ids": np.arange(TOKENS)[None].repeat(TEXTS, axis=0) // 90},
    "mask": {"mask": masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=2, homo_head=True)},
    "same bits": {"deterministic": True},
}


def case(head_dim, cut, **options):
    """Return the gradients of q, k and v."""
    run = functools.partial(jattn.attention, causal=True, implementation="mosaic_gpu", **options)
    loss = lambda q, k, v: (run(q, k, v).astype(jnp.float32) ** 2).sum()
    abstract_array = lambda heads: jax.ShapeDtypeStruct((TEXTS, TOKENS, heads, head_dim), jnp.bfloat16)
    return (
        jax.grad(loss, argnums=(0, 1, 2)),
        (abstract_array(Q_HEADS), abstract_array(KV_HEADS), abstract_array(KV_HEADS)),
        cut,
    )


def aot_cases():
    """Return (function, abstract arguments, their partitions) by the name of the case."""
    cases = {f"{name} by texts": case(64, BY_TEXTS, **options) for name, options in LAYERS.items()}
    cases |= {f"{name} by heads": case(128, BY_HEADS, **options) for name, options in LAYERS.items()}
    return cases
