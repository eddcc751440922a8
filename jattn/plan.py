"""What a step's attention needs to know beyond its metadata, made once and shared by all layers."""

from collections.abc import Sequence

import jax

from jattn.implementations.mosaic_gpu import DecodePlan, PrefillPlan, plan_decode, plan_prefill
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
        decode: The decode kernel's schedules, one for each kind of layer; none without a decode region or
            without a kernel here.
        prefill: The same of the prefill kernel.
        query_tiles: The prefill region's tiles for XLA; None where the bucket has none.
        bucket: Static: the bucket that it was made for.
    """

    decode: tuple[DecodePlan, ...]
    prefill: tuple[PrefillPlan, ...]
    query_tiles: QueryTiles | None
    bucket: Bucket = static()


def plan(
    metadata: BatchMetadata,
    spec: AttentionSpec | Sequence[AttentionSpec],
    cache_spec: CacheSpec | None = None,
) -> Plan:
    """Schedules a step. Traced; optional: `attend` makes the same plan where it is given none.

    Args:
        metadata: The step's metadata.
        spec: A layer, or the layers of a model. Layers that see the same keys share a schedule; one whose
            heads or mask are in none of these schedules itself.
        cache_spec: Checked against the others where given.

    Raises:
        ValueError: spec and cache_spec, or metadata and cache_spec, do not belong together.
    """
    specs = (spec,) if isinstance(spec, AttentionSpec) else tuple(dict.fromkeys(spec))
    require(len(specs) > 0, "spec", "be a layer or at least one", spec)
    if cache_spec is not None:
        for one in specs:
            _check_cache(metadata, one, cache_spec)
    bucket = metadata.bucket
    decode: dict[object, DecodePlan] = {}
    prefill: dict[object, PrefillPlan] = {}
    if support.why_not(platform=jax.default_backend()) is None:
        for one in specs if bucket.max_decodes else ():
            for made in plan_decode(metadata.decode_part, one):
                decode.setdefault((made.layer, made.spans), made)
        for one in specs if bucket.max_prefill_tokens else ():
            for each in plan_prefill(metadata.prefill_part, one):
                prefill.setdefault((each.mask, each.tiles), each)
    return Plan(
        decode=tuple(decode.values()),
        prefill=tuple(prefill.values()),
        query_tiles=prefill_tiles(metadata.prefill_part) if bucket.max_prefill_tokens > 0 else None,
        bucket=bucket,
    )


def _check_cache(metadata: BatchMetadata, spec: AttentionSpec, cache_spec: CacheSpec) -> None:
    for name, owner, want in (
        ("num_kv_heads", "spec's", spec.num_kv_heads),
        ("head_dim", "spec's", spec.head_dim),
        ("block_size", "metadata's", metadata.block_size),
    ):
        got = getattr(cache_spec, name)
        require(got == want, f"cache_spec.{name}", f"be the {owner} ({want})", got)
