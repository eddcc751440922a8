"""Decoders with random weights, made on the device."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder


def random_decoder(config: dict[str, Any]) -> Decoder:
    """A bfloat16 decoder of a config.json."""
    made = DecoderConfig.from_hf(config)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(made, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights = [
        jnp.ones(leaf.shape, leaf.dtype) if leaf.ndim == 1 else draw(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, weights))
