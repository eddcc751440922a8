"""What attention in one region of a step computes from, and the results that its gradients start from."""

from typing import NamedTuple

from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.masks import Mask
from jattn.pytree import pytree, static
from jattn.score_mod import ScoreMod
from jattn.spec import AttentionSpec

type OutAndLse = tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]


@pytree
class RegionInputs:
    """Inputs of attention in one region of a step, which every implementation takes.

    Attributes:
        query: Queries of the region.
        kv: Keys and values.
        metadata: Metadata of the region as a separate step.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        sinks: Attention sinks per head; None without sinks.
        alibi_slopes: ALiBi slope per head; None without ALiBi.
        score_mod: Score function of the layer; None without one.
        spec: Attention of the layer (static).
    """

    query: Float[Array, "tokens q_heads head_dim"]
    kv: PagedCache | PackedKV
    metadata: BatchMetadata
    mask: Mask | None = None
    sinks: Float[Array, " q_heads"] | None = None
    alibi_slopes: Float[Array, " q_heads"] | None = None
    score_mod: ScoreMod | None = None
    spec: AttentionSpec = static()


class OutputGradients(NamedTuple):
    """Results of the forward pass and their gradients.

    Attributes:
        out: Output.
        lse: Log-sum-exp.
        grad_out: Gradient of the output.
        grad_lse: Gradient of the log-sum-exp; None is 0.
    """

    out: Float[Array, "tokens q_heads head_dim"]
    lse: Float[Array, "q_heads tokens"]
    grad_out: Float[Array, "tokens q_heads head_dim"]
    grad_lse: Float[Array, "q_heads tokens"] | None
