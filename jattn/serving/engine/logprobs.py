"""Log-probabilities of tokens under the model's own logits, before penalties, biases and temperature."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

CHUNK = 256  # tokens per chunk: 156 MB of logits for a vocabulary of 152k


class Logprob(NamedTuple):
    """The log-probability of a token at one position.

    Attributes:
        logprob: Natural logarithm of the probability.
        rank: Rank of the token; 1 is the most likely token.
    """

    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """The log-probabilities at many positions, on the device.

    Attributes:
        chosen: Log-probability of the chosen token.
        ranks: Number of tokens that are at least as likely as the chosen one, including itself.
        top_ids: The most likely tokens.
        top: Log-probabilities of the most likely tokens.
    """

    chosen: Float32[Array, " positions"]
    ranks: Int32[Array, " positions"]
    top_ids: Int32[Array, "positions num"]
    top: Float32[Array, "positions num"]

    def at(self, position: int, token_id: int, num: int) -> dict[int, Logprob]:
        """Return a position's chosen token and `num` most likely tokens. Requires arrays on the host.

        Source: vLLM's `logprobs_dict`: the chosen token first, then the others by rank.
        """
        chosen = {token_id: Logprob(float(self.chosen[position]), int(self.ranks[position]))}
        ids, logprobs = self.top_ids[position, :num].tolist(), self.top[position, :num].tolist()
        likeliest = enumerate(zip(ids, logprobs, strict=True), 1)
        return chosen | {i: Logprob(logprob, rank) for rank, (i, logprob) in likeliest if i != token_id}


def compute_logprobs(
    logits: Float[Array, "positions vocab"], token_ids: Int32[Array, " positions"], num: int
) -> TokenLogprobs:
    """Return the log-probabilities of the chosen tokens and of the `num` most likely tokens.

    Works inside jit.
    """
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
    """Return the log-probabilities of the token after each token of a step, in chunks to limit the memory.

    Args:
        graphdef: Model structure from `nnx.split`. Static.
        params: State of the model.
        hidden: Hidden states of the step's tokens after the last layer.
        next_ids: Token id after each token. Padding may hold any id.
        num: Number of most likely tokens to report. Static.
    """
    model = nnx.merge(graphdef, params)
    size = min(CHUNK, hidden.shape[0])
    chunks = -(-hidden.shape[0] // size)
    padding = chunks * size - hidden.shape[0]
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, size, -1)
    ids = jnp.pad(next_ids, (0, padding)).reshape(chunks, size)

    def chunk_logprobs(chunk: tuple[Array, Array]) -> TokenLogprobs:
        return compute_logprobs(model.logits(chunk[0]), chunk[1], num)

    result = jax.lax.map(chunk_logprobs, (hidden, ids))
    return TokenLogprobs(*(x.reshape(chunks * size, *x.shape[2:])[: chunks * size - padding] for x in result))
