"""Which implementation serves each kind of layer of a step."""

import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

from jattn.implementations.choice import Asked, KernelFallbackWarning, asked_for, choose
from jattn.implementations.layers import Layer, regions_of
from jattn.masks import Mask, check_mask_of_step
from jattn.metadata.batch import BatchMetadata
from jattn.planning.layer_plans import LayerPlan
from pallas_kernels import support


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


def _warn_of_fallbacks(one: LayerPlan) -> None:
    for region, choice in one.choices:
        if choice.implementation != "mosaic_gpu":
            warnings.warn(
                f"attention falls to {choice.implementation} on a GPU, which is slow: {region} of "
                f"({one.layer}): {choice.reason}. Change that, or say implementation="
                f"{choice.implementation!r} if it is what you want ('mosaic_gpu' makes it an error).",
                KernelFallbackWarning,
                skip_file_prefixes=(str(pathlib.Path(__file__).parents[1]),),
            )
