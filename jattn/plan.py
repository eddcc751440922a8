"""What a step's attention needs to know beyond its metadata, made once and shared by all layers."""

import jax

from jattn.implementations.mosaic_gpu import DecodePlan, plan_decode, why_not_plan_decode
from jattn.implementations.tiles import QueryTiles, prefill_tiles
from jattn.metadata.batch import BatchMetadata
from jattn.pytree import pytree, static
from jattn.spec import AttentionSpec, Bucket, CacheSpec
from pallas_kernels import support
from pallas_kernels.checks import require


@pytree
class Plan:
    """A step's schedule.

    Attributes:
        decode: The decode kernel's schedule; None without a decode region or without a kernel here.
        query_tiles: The prefill region's tiles; None where the bucket has none.
        bucket: Static: the bucket that it was made for.
    """

    decode: DecodePlan | None
    query_tiles: QueryTiles | None
    bucket: Bucket = static()


def plan(metadata: BatchMetadata, spec: AttentionSpec, cache_spec: CacheSpec | None = None) -> Plan:
    """Schedules a step. Traced; optional: `attend` makes the same plan where it is given none.

    Layers of one model may share a plan whatever their masks: a layer whose heads or mask are other than
    spec's schedules its decode region itself.

    Raises:
        ValueError: spec and cache_spec, or metadata and cache_spec, do not belong together.
    """
    if cache_spec is not None:
        for name in ("num_kv_heads", "head_dim"):
            want = getattr(spec, name)
            require(
                getattr(cache_spec, name) == want,
                f"cache_spec.{name}",
                f"be the spec's ({want})",
                getattr(cache_spec, name),
            )
        size = metadata.block_size
        require(
            cache_spec.block_size == size,
            "cache_spec.block_size",
            f"be the metadata's ({size})",
            cache_spec.block_size,
        )
    bucket = metadata.bucket
    reason = support.why_not(platform=jax.default_backend()) or why_not_plan_decode(metadata, spec)
    return Plan(
        decode=plan_decode(metadata, spec) if reason is None else None,
        query_tiles=prefill_tiles(metadata) if bucket.max_prefill_tokens > 0 else None,
        bucket=bucket,
    )
