"""Decoders with random weights, initialized on their devices."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.models.sharding import check_divides, parameter_sharding
from jattn.parallel import TP


def random_decoder(
    config: dict[str, Any], mesh: Mesh | None = None, *, implementation: str | None = None
) -> Decoder:
    """Create a bfloat16 decoder whose weights do not depend on the mesh; each device draws its own shard.

    Args:
        config: Contents of a config.json.
        mesh: Mesh over which the parameters are sharded; None is one device.
        implementation: Implementation of attention; None chooses the default.
    """
    decoder_config = DecoderConfig.from_hf(config)
    if mesh is not None:
        check_divides(decoder_config, mesh)
        decoder_config = decoder_config.with_mesh(mesh.shape[TP])
    shapes = nnx.eval_shape(
        lambda: Decoder(decoder_config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, implementation=implementation)
    )
    graphdef, state = nnx.split(shapes)
    flat = nnx.to_flat_state(state)
    keys = jax.random.split(jax.random.key(0), len(flat))
    weights = [
        (path, variable.replace(_random_parameter(key, path, variable, mesh)))
        for key, (path, variable) in zip(keys, flat, strict=True)
    ]
    model = nnx.merge(graphdef, nnx.from_flat_state(weights))
    model.mesh = mesh
    return model


def _random_parameter(key: Any, path: Any, variable: Any, mesh: Mesh | None) -> jax.Array:
    shape = variable.shape
    sharding = None if mesh is None else parameter_sharding(mesh, path, len(shape))
    if len(shape) == 1:
        return jnp.ones(shape, variable.dtype, device=sharding)
    return jax.jit(_normal, static_argnums=1, out_shardings=sharding)(key, shape)


def _normal(key: Any, shape: tuple[int, ...]) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape, jnp.bfloat16)
