"""What a step's attention needs to know beyond its metadata, made once and shared by all layers."""

from collections.abc import Sequence

import jax

from jattn.implementations.mosaic_gpu import plan_decode, plan_prefill
from jattn.implementations.region_plans import RegionPlan
from jattn.implementations.tiles import QueryTiles, prefill_tiles
from jattn.masks import Mask
from jattn.metadata.batch import BatchMetadata
from jattn.pytree import pytree, static
from jattn.spec import AttentionSpec, Bucket, CacheSpec
from pallas_kernels import support
from pallas_kernels.checks import require


@pytree
class Plan:
    """A step's schedule, and which keys are visited under the sparse masks of its layers.

    Attributes:
        decode: The decode region's schedules and lists, one for each kind of layer; none without a decode
            region or without a kernel here.
        prefill: The same of the prefill region.
        query_tiles: The prefill region's tiles for XLA; None where the bucket has none.
        mask: Which keys the queries of all layers see, besides what their specs say; None = no such mask.
        bucket: Static: the bucket that it was made for.
        sparsity: Static: the masks of the layers that it was made for, None among them.
    """

    decode: tuple[RegionPlan, ...]
    prefill: tuple[RegionPlan, ...]
    query_tiles: QueryTiles | None
    mask: Mask | None
    bucket: Bucket = static()
    sparsity: tuple[Mask | None, ...] = static()


def plan(
    metadata: BatchMetadata,
    spec: AttentionSpec | Sequence[AttentionSpec],
    cache_spec: CacheSpec | None = None,
    *,
    mask: Mask | None = None,
) -> Plan:
    """Schedules a step. Traced; optional: `attend` makes the same plan where it is given none.

    Args:
        metadata: The step's metadata.
        spec: A layer, or the layers of a model. Layers that see the same keys share a schedule, and those of
            one `sparsity` its lists; one whose heads or window are in none of these schedules itself.
        cache_spec: Checked against the others where given.
        mask: A mask of this step that holds in every layer, on top of the layers' own; may have arrays. Its
            lists are made here, once; `attend` takes it from the plan.

    Raises:
        ValueError: spec and cache_spec, or metadata and cache_spec, do not belong together.
    """
    specs = (spec,) if isinstance(spec, AttentionSpec) else tuple(dict.fromkeys(spec))
    require(len(specs) > 0, "spec", "be a layer or at least one", spec)
    if cache_spec is not None:
        for one in specs:
            _check_cache(metadata, one, cache_spec)
    bucket = metadata.bucket
    decode: dict[object, RegionPlan] = {}
    prefill: dict[object, RegionPlan] = {}
    if support.why_not(platform=jax.default_backend()) is None:
        for one in specs:
            whole = one.mask_with(mask)
            if bucket.max_decodes:
                for made in plan_decode(metadata.decode_part, one, whole):
                    decode.setdefault(made.key, made)
            if bucket.max_prefill_tokens:
                of_region = None if whole is None else whole.of_rows_from(bucket.max_decodes)
                for each in plan_prefill(metadata.prefill_part, one, of_region):
                    prefill.setdefault(each.key, each)
    return Plan(
        decode=tuple(decode.values()),
        prefill=tuple(prefill.values()),
        query_tiles=prefill_tiles(metadata.prefill_part) if bucket.max_prefill_tokens > 0 else None,
        mask=mask,
        bucket=bucket,
        sparsity=tuple(dict.fromkeys(one.sparsity for one in specs)),
    )


def _check_cache(metadata: BatchMetadata, spec: AttentionSpec, cache_spec: CacheSpec) -> None:
    for name, owner, want in (
        ("num_kv_heads", "spec's", spec.num_kv_heads),
        ("head_dim", "spec's", spec.head_dim),
        ("block_size", "metadata's", metadata.block_size),
    ):
        got = getattr(cache_spec, name)
        require(got == want, f"cache_spec.{name}", f"be the {owner} ({want})", got)
