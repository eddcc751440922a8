"""The plan of a step: which implementation serves each kind of layer, and what is made once for all."""

import dataclasses
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jattn.bucket import Bucket
from jattn.implementations.choice import Asked, Choice, asked_for, choose
from jattn.implementations.kernel_work import (
    DecodeKernel,
    DecodeWork,
    Work,
    decode_work,
    prefill_work,
    work_key,
)
from jattn.implementations.layers import REGIONS, AnyCache, Layer, layer_of, regions_of
from jattn.implementations.xla import QueryTiles, prefill_tiles
from jattn.masks import Mask, check_mask_of_step
from jattn.metadata.batch import BatchMetadata
from jattn.pytree import pytree, static
from jattn.spec import AttentionSpec
from pallas_kernels import support
from pallas_kernels.checks import require, require_type


class KernelFallbackWarning(UserWarning):
    """A layer on a GPU that is served without a kernel, and so slowly, though nobody asked for that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What serves a kind of layer.

    Attributes:
        layer: The kind of layer.
        is_for_any_cache: No kernel was in question, so that the choice holds however keys are stored.
        decode: In the decode region; None without one.
        prefill: In the prefill region; None without one.
        works: Which of the plan's works each of the two is given; None = none, or one of the layer's own.
    """

    layer: Layer
    is_for_any_cache: bool
    decode: Choice | None
    prefill: Choice | None
    works: tuple[int | None, int | None] = (None, None)

    def covers(self, layer: Layer) -> bool:
        """Whether a layer is of this kind."""
        return layer == self.layer or (self.is_for_any_cache and layer.spec == self.layer.spec)

    @property
    def choices(self) -> tuple[tuple[str, Choice], ...]:
        """The regions that there are, by name, and what serves them."""
        pairs = zip(REGIONS, (self.decode, self.prefill), strict=True)
        return tuple((name, choice) for name, choice in pairs if choice is not None)


@pytree
class Plan:
    """A step's choices, schedules and lists. `print(plan)` is a table.

    Attributes:
        works: What kernels are given: schedules and lists, one for all layers that agree in them.
        query_tiles: The prefill region's tiles for XLA; None where no layer wants them.
        mask: Which keys the queries of all layers see, besides what their specs say; None = no such mask.
        seq_lens: Those of the batch that it was made for.
        layers: Static: the kinds of layers, and what serves each.
        bucket: Static: the bucket that it was made for.
    """

    works: tuple[Work, ...]
    query_tiles: QueryTiles | None
    mask: Mask | None
    seq_lens: Int32[Array, " reqs"]
    layers: tuple[LayerPlan, ...] = static()
    bucket: Bucket = static()

    def layer_plan(self, layer: Layer) -> LayerPlan:
        """What serves a layer.

        Raises:
            ValueError: The plan was made for others.
        """
        for one in self.layers:
            if one.covers(layer):
                return one
        kinds = " or ".join(f"({one.layer})" for one in self.layers)
        raise ValueError(f"the layer must be one that the plan was made for, {kinds}, got ({layer}).")

    def __str__(self) -> str:
        return table(self.layers)


def plan(
    metadata: BatchMetadata,
    specs: AttentionSpec | Sequence[AttentionSpec],
    cache_specs: AnyCache | Sequence[AnyCache | None] | None = None,
    *,
    mask: Mask | None = None,
    implementation: Asked = None,
    query_dtype: DTypeLike | None = None,
) -> Plan:
    """Chooses what serves each layer of a step, and makes what the layers share. Traced.

    `attend` does the same for its one layer where it is given no plan. A layer on a GPU that no kernel serves
    is warned of (KernelFallbackWarning), unless `implementation` says that this is wanted.

    Args:
        metadata: The step's metadata.
        specs: A layer, or the layers of a model. Equal ones are one kind.
        cache_specs: How keys are stored: one for all layers or one for each; a CacheSpec, or the PagedCache
            itself. None = keys that are not in a paged cache (PackedKV).
        mask: A mask of this step that holds in every layer, on top of the layers' own; may have arrays. Its
            lists are made here, once; `attend` takes it from the plan.
        implementation: "mosaic_gpu", "xla" or "reference", or several in order of preference; None = the best
            that the device and the layer allow.
        query_dtype: Of the layers' queries; None = the dtype of their caches, as their CacheSpecs have it.

    Raises:
        ValueError: Specs and cache specs, or metadata and cache specs, do not belong together.
        NotImplementedError: No implementation asked for can serve a layer; the message says why.
    """
    layers = _kinds(metadata, specs, cache_specs, query_dtype)
    chosen = choose_layers(metadata, layers, mask, implementation=implementation)
    return planned(metadata, chosen, mask)


def choose_layers(
    metadata: BatchMetadata, layers: Sequence[Layer], mask: Mask | None, *, implementation: Asked
) -> tuple[LayerPlan, ...]:
    """What serves each kind of layer. Looks at shapes, and at the device of the metadata.

    Args:
        metadata: The step's metadata, or its shapes.
        layers: The kinds of layers, each once.
        mask: As in `plan`.
        implementation: As in `plan`.

    Raises:
        ValueError: The mask does not belong to the step or to a layer.
        NotImplementedError: As `plan`.
    """
    regions, no_kernels = regions_of(metadata), support.why_not_on(metadata)
    how: dict[str, Any] = {"implementation": implementation, "no_kernels": no_kernels}
    is_for_any = no_kernels is not None or "mosaic_gpu" not in asked_for(implementation)
    made = []
    for layer in layers:
        if mask is not None:
            heads, causal = layer.spec.num_q_heads, layer.spec.causal
            has_cache = layer.cache is not None
            check_mask_of_step(mask, metadata, num_q_heads=heads, causal=causal, has_cache=has_cache)
        whole = layer.spec.mask_with(mask)
        choices = {region.name: choose(layer, region, whole, **how) for region in regions}
        one = LayerPlan(
            layer=layer,
            is_for_any_cache=is_for_any,
            decode=choices.get("decode"),
            prefill=choices.get("prefill"),
        )
        if implementation is None and support.is_gpu(metadata):
            _warn_of_fallbacks(one)
        made.append(one)
    return tuple(made)


def planned(metadata: BatchMetadata, layers: tuple[LayerPlan, ...], mask: Mask | None) -> Plan:
    """The plan of these choices. Eagerly it is one call of a compiled function, which jax keeps."""
    make = _make_eagerly if support.is_concrete(metadata, mask) else _make
    works, tiles = make(metadata, mask, layers)
    return Plan(
        works=works,
        query_tiles=tiles,
        mask=mask,
        seq_lens=metadata.seq_lens,
        layers=_numbered(layers),
        bucket=metadata.bucket,
    )


# ----------------------------------------------------------------------------------------- making
class _WorkSlot(NamedTuple):
    """A work that layers share: its key, and the layer and region that it is made by."""

    key: tuple[Any, ...]
    layer: LayerPlan
    region: int


def _slots(layers: tuple[LayerPlan, ...]) -> tuple[_WorkSlot, ...]:
    """The works of a plan, in their order."""
    slots: dict[tuple[Any, ...], _WorkSlot] = {}
    for one in layers:
        for region, choice in enumerate((one.decode, one.prefill)):
            key = _key(choice, one.layer.spec, region)
            if key is not None:
                slots.setdefault(key, _WorkSlot(key, one, region))
    return tuple(slots.values())


def _key(choice: Choice | None, spec: AttentionSpec, region: int) -> tuple[Any, ...] | None:
    if choice is None or choice.kernel is None:
        return None
    key = work_key(choice.kernel, spec)
    return None if key is None else (region, *key)


def _numbered(layers: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
    """The layers with the numbers of their works."""
    places: dict[Any, int] = {slot.key: i for i, slot in enumerate(_slots(layers))}
    number = lambda choice, one, region: places.get(_key(choice, one.layer.spec, region))
    return tuple(
        dataclasses.replace(one, works=(number(one.decode, one, 0), number(one.prefill, one, 1)))
        for one in layers
    )


def _make(
    metadata: BatchMetadata, mask: Mask | None, layers: tuple[LayerPlan, ...]
) -> tuple[tuple[Work, ...], QueryTiles | None]:
    """The works of a plan, and XLA's tiles."""
    works: list[Work] = []
    block_lists: dict[Any, Any] = {}
    for slot in _slots(layers):
        spec, region = slot.layer.layer.spec, slot.region
        choice = (slot.layer.decode, slot.layer.prefill)[region]
        part, first = ((metadata.decode_part, 0), (metadata.prefill_part, metadata.bucket.max_decodes))[
            region
        ]
        whole = spec.mask_with(mask)
        whole = None if whole is None else whole.of_rows_from(first)
        assert choice is not None
        assert choice.kernel is not None
        if isinstance(choice.kernel, DecodeKernel):
            sizes = choice.kernel.list_block_size, spec.num_q_heads, spec.num_kv_heads, spec.sparsity
            work: Work = decode_work(choice.kernel, part, spec, whole, block_list=block_lists.get(sizes))
            assert isinstance(work, DecodeWork)
            block_lists[sizes] = work.block_list
        else:
            work = prefill_work(choice.kernel, part, spec, whole)
        works.append(work)
    wants_tiles = any(one.prefill is not None and one.prefill.implementation == "xla" for one in layers)
    return tuple(works), prefill_tiles(metadata.prefill_part) if wants_tiles else None


_make_eagerly = jax.jit(_make, static_argnames="layers")


# --------------------------------------------------------------------------------------- checking
def _kinds(
    metadata: BatchMetadata,
    specs: AttentionSpec | Sequence[AttentionSpec],
    cache_specs: AnyCache | Sequence[AnyCache | None] | None,
    query_dtype: DTypeLike | None,
) -> tuple[Layer, ...]:
    """The kinds of the layers, each once."""
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    listed = (specs,) if isinstance(specs, AttentionSpec) else tuple(specs)
    require(len(listed) > 0, "specs", "be a layer or at least one", listed)
    for one in listed:
        require_type("specs", one, AttentionSpec, "one, or one a layer")
    if isinstance(cache_specs, list | tuple):
        caches = tuple(cache_specs)
        require(len(caches) == len(listed), "cache_specs", f"be one or {len(listed)}, as specs", len(caches))
    else:
        caches = (cache_specs,) * len(listed)
    for spec, cache in zip(listed, caches, strict=True):
        _check_cache(metadata, spec, cache)
    layers = (layer_of(spec, cache, query_dtype) for spec, cache in zip(listed, caches, strict=True))
    return tuple(dict.fromkeys(layers))


def _check_cache(metadata: BatchMetadata, spec: AttentionSpec, cache: Any) -> None:
    owners = [("num_kv_heads", "spec's", spec.num_kv_heads), ("head_dim", "spec's", spec.head_dim)]
    if hasattr(cache, "block_size"):
        owners.append(("block_size", "metadata's", metadata.block_size))
    for name, owner, want in owners if cache is not None else ():
        got = getattr(cache, name, None)
        require(got is not None, "cache_specs", "be of CacheSpec, PagedCache or None", type(cache).__name__)
        require(got == want, f"cache_spec.{name}", f"be the {owner} ({want})", got)


def check_batch_of(plan: Plan, metadata: BatchMetadata) -> None:
    """A plan must have been made for this batch: told by its bucket and, where they can be seen, its lengths.

    Raises:
        ValueError: It was made for another.
    """
    require(plan.bucket == metadata.bucket, "plan.bucket", f"be {metadata.bucket}", plan.bucket)
    if plan.seq_lens is metadata.seq_lens or not support.is_concrete(plan.seq_lens, metadata.seq_lens):
        return
    mine, theirs = np.asarray(plan.seq_lens), np.asarray(metadata.seq_lens)
    rule, got = f"be made for this batch (seq_lens {theirs})", f"one for seq_lens {mine}"
    require(np.array_equal(mine, theirs), "plan", rule, got)


def _warn_of_fallbacks(one: LayerPlan) -> None:
    for region, choice in one.choices:
        if choice.implementation != "mosaic_gpu":
            warnings.warn(
                f"attention falls to {choice.implementation} on a GPU, which is slow: {region} of "
                f"({one.layer}): {choice.reason}. Change that, or say implementation="
                f"{choice.implementation!r} if it is what you want ('mosaic_gpu' makes it an error).",
                KernelFallbackWarning,
                skip_file_prefixes=(str(pathlib.Path(__file__).parent),),
            )


# --------------------------------------------------------------------------------------- printing
COLUMNS = ("layer", "region", "implementation", "tiles", "split", "reason")


def rows(layers: Sequence[LayerPlan]) -> list[tuple[str, ...]]:
    """COLUMNS of each kind of layer and region."""
    return [
        (
            str(one.layer),
            region,
            choice.implementation if choice.kernel is None else f"{choice.implementation} {choice.kernel}",
            "" if choice.kernel is None else choice.kernel.sizes,
            "" if choice.kernel is None else choice.kernel.split,
            choice.reason or "",
        )
        for one in layers
        for region, choice in one.choices
    ]


def table(layers: Sequence[LayerPlan]) -> str:
    """Choices as lines of text, a kind of layer and a region each."""
    return aligned([COLUMNS, *rows(layers)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
