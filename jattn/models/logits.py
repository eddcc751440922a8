"""What a config makes of the product with the vocabulary."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jattn.models.config import DecoderConfig


def logits_of(
    scores: Float32[Array, "n vocab"], bias: Float[Array, " padded"] | None, config: DecoderConfig
) -> Float32[Array, "n vocab"]:
    """Scores with a bias, scaled, soft-capped, some hidden.

    Args:
        scores: Of each token of the vocabulary.
        bias: Of each, perhaps of some more behind them; None = none.
        config: The model's.
    """
    if bias is not None:
        scores = scores + bias[: config.vocab_size].astype(scores.dtype)[None, :]
    scores = scores if config.logit_scale is None else scores * config.logit_scale
    cap = config.final_logit_softcapping
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    if config.hidden_tokens:
        lowest = jnp.finfo(scores.dtype).min
        scores = scores.at[:, np.array(config.hidden_tokens)].set(lowest)
    return scores
