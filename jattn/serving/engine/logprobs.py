"""Log-probabilities of tokens, by the model's own logits: before penalties, biases and temperature."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

CHUNK = 256  # tokens whose logits are held at once: of a vocabulary of 152k 156 MB


class Logprob(NamedTuple):
    """Of one token at one place.

    Attributes:
        logprob: Natural log of its probability.
        rank: 1 = the likeliest token there.
    """

    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """Of many places, on the device.

    Attributes:
        chosen: Log-probability of the token that stands there.
        ranks: How many tokens are as likely or likelier, itself included.
        top_ids: The likeliest tokens.
        top: Their log-probabilities.
    """

    chosen: Float32[Array, " places"]
    ranks: Int32[Array, " places"]
    top_ids: Int32[Array, "places num"]
    top: Float32[Array, "places num"]

    def at(self, place: int, token_id: int, num: int) -> dict[int, Logprob]:
        """The `num` likeliest tokens of a place, or all, and the one that stands there, once fetched.

        Source: vLLM's `logprobs_dict`: the token itself first, then the others by rank.
        """
        own = {token_id: Logprob(float(self.chosen[place]), int(self.ranks[place]))}
        ids, logprobs = self.top_ids[place, :num].tolist(), self.top[place, :num].tolist()
        likeliest = enumerate(zip(ids, logprobs, strict=True), 1)
        return own | {i: Logprob(logprob, rank) for rank, (i, logprob) in likeliest if i != token_id}


def logprobs_of(
    logits: Float[Array, "places vocab"], token_ids: Int32[Array, " places"], num: int
) -> TokenLogprobs:
    """The tokens that stand at some places, and the `num` likeliest there, or all there are. Traced."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    ranks = jnp.sum(logprobs >= chosen, axis=-1, dtype=jnp.int32)
    top, top_ids = jax.lax.top_k(logprobs, min(num, logprobs.shape[-1]))
    return TokenLogprobs(chosen[:, 0], ranks, top_ids.astype(jnp.int32), top)


@functools.partial(jax.jit, static_argnames=("graphdef", "num"))
def prompt_logprobs(
    graphdef: Any,
    params: Any,
    hidden: Float[Array, "tokens hidden"],
    next_ids: Int32[Array, " tokens"],
    *,
    num: int,
) -> TokenLogprobs:
    """Of the token that follows each token of a step, by chunks: all logits at once would not fit.

    Args:
        graphdef: The model, from `nnx.split`. Static.
        params: Its state.
        hidden: What the step's tokens became behind the last layer.
        next_ids: The token behind each. Padding may hold any id.
        num: How many of the likeliest. Static.
    """
    model = nnx.merge(graphdef, params)
    size = min(CHUNK, hidden.shape[0])
    chunks = -(-hidden.shape[0] // size)
    padding = chunks * size - hidden.shape[0]
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, size, -1)
    ids = jnp.pad(next_ids, (0, padding)).reshape(chunks, size)
    of_chunk = lambda chunk: logprobs_of(model.logits(chunk[0]), chunk[1], num)
    result = jax.lax.map(of_chunk, (hidden, ids))
    return TokenLogprobs(*(x.reshape(chunks * size, *x.shape[2:])[: chunks * size - padding] for x in result))


def fetched(logprobs: TokenLogprobs) -> TokenLogprobs:
    """As numpy's arrays; waits for the device."""
    return jax.device_get(logprobs)
