"""Attention of a region over keys outside a cache, with its derivative: what training runs through.

The backward pass has queries, keys, values, outputs and log-sum-exps, and computes everything else anew.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jattn.cache import PackedKV
from jattn.implementations import mosaic_gpu, xla
from jattn.implementations.choice import Choice
from jattn.implementations.derivatives import once_derivable
from jattn.implementations.mosaic_gpu import Work
from jattn.implementations.xla import QueryTiles, varying_as
from jattn.masks import Mask
from jattn.metadata.batch import BatchMetadata
from jattn.spec import AttentionSpec

type OutAndLse = tuple[Array, Array | None]


@dataclasses.dataclass(frozen=True)
class How:
    """What is static: the layer, what serves it, and whether the log-sum-exp is wanted."""

    spec: AttentionSpec
    choice: Choice
    return_lse: bool


class Values(NamedTuple):
    """What has a gradient."""

    query: Float[Array, "tokens q_heads head_dim"]
    k: Float[Array, "kv_tokens kv_heads head_dim"]
    v: Float[Array, "kv_tokens kv_heads head_dim"]
    sinks: Float[Array, " q_heads"] | None
    alibi_slopes: Float[Array, " q_heads"] | None


class Context(NamedTuple):
    """What has none.

    Attributes:
        kv_start_loc: First key of each row.
        metadata: The region as a step of its own.
        mask: Which keys a query sees beyond the spec's numbers.
        tiles: XLA's tiles of the prefill region, made once a step; None = made here.
        work: What a kernel is given, where the plan has it.
    """

    kv_start_loc: Int[Array, " reqs"]
    metadata: BatchMetadata
    mask: Mask | None
    tiles: QueryTiles | None
    work: Work | None


def attend(how: How, values: Values, context: Context) -> OutAndLse:
    """Output of a region's tokens, and their log-sum-exp or None, as `jattn.attend` defines them."""
    return _attend(how, varying_together(values), context)


def varying_together(values: Values) -> Values:
    """All values varying over every device axis that one of them varies over, under shard_map.

    What they lack is broadcast here, so that the sum over devices that its gradient needs is made here, too.
    """
    for like in values:
        values = values if like is None else varying_as(like, values)
    return values


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, values: Values, context: Context) -> OutAndLse:
    query, k, v, sinks, alibi_slopes = values
    kv = PackedKV(k=k, v=v, kv_start_loc=context.kv_start_loc)
    metadata, spec, kernel = context.metadata, how.spec, how.choice.kernel
    options: dict[str, Any] = {"mask": context.mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
    if kernel is not None:
        options["return_lse"] = how.return_lse
        return mosaic_gpu.attend(query, kv, metadata, spec, kernel, context.work, **options)
    out, lse = xla.attend(query, kv, metadata, spec, tiles=context.tiles, **options)
    return out, lse if how.return_lse else None


class _Saved(NamedTuple):
    values: Values
    out: Array
    lse: Array


def _forward(how: How, values: Values, context: Context) -> tuple[OutAndLse, tuple[_Saved, Context]]:
    values = once_derivable(values)
    out, lse = _attend(dataclasses.replace(how, return_lse=True), values, context)
    assert lse is not None
    return (out, lse if how.return_lse else None), (_Saved(values, out, lse), context)


def _backward(how: How, kept: tuple[_Saved, Context], grads: OutAndLse) -> tuple[Values, None]:
    (values, out, lse), grads = once_derivable((kept[0], grads))
    query, k, v, sinks, alibi_slopes = values
    context = kept[1]
    kv = PackedKV(k=k, v=v, kv_start_loc=context.kv_start_loc)
    problem = xla.Problem(kv, context.metadata, how.spec, context.mask, sinks, alibi_slopes)
    return Values(*xla.gradients(query, problem, xla.Saved(out, lse, *grads))), None


_attend.defvjp(_forward, _backward)
