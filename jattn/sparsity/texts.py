"""Arrays as recipes take them: a batch of texts, or one text without a batch."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from jattn.masks.arguments import require_floats
from pallas_kernels.checks import require, require_shape


def as_texts(
    q: Float[Array, "..."], *keys: Float[Array, "..."], names: Sequence[str] = ("k", "v")
) -> tuple[Float[Array, "batch tokens heads head_dim"], ...]:
    """The same with a batch, of one where there is none.

    Args:
        q: [batch, tokens, q_heads, head_dim], or without the batch.
        *keys: As q, of kv heads.
        names: Of the keys.

    Raises:
        ValueError: They do not belong together, or have no tokens.
    """
    require_floats(**dict(zip(("q", *names), (q, *keys), strict=False)))
    rule = "have shape [batch, tokens, q_heads, head_dim], or no batch"
    require(q.ndim in (3, 4), "q", rule, tuple(q.shape))
    require(q.shape[-3] > 0, "q", "have at least one token", tuple(q.shape))
    for name, array in zip(names, keys, strict=False):
        q_heads, heads = q.shape[-2], array.shape[-2] if array.ndim == q.ndim else 1
        require_shape(name, array.shape, (*q.shape[:-2], heads, q.shape[-1]), "as q, of its own heads")
        rule = f"be a multiple of {name}'s ({heads})"
        require(heads > 0 and q_heads % heads == 0, "q's heads", rule, q_heads)
    return tuple(x if x.ndim == 4 else x[None] for x in (q, *keys))
