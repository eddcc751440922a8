"""Choices of vLLM's attention back ends: shared hyperparameters, cache layout, decode kernel."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jattn.batch.int_arrays import python_ints
from pallas_kernels.checks import require, require_one_of, require_positive, require_type

KV_CACHE_LAYOUTS = ("NHD", "HND")


@dataclasses.dataclass(frozen=True)
class PerLayerParameters:
    """Attention parameters of one layer that some back ends require to be equal in all layers.

    Attributes:
        window_left: Number of preceding tokens that a query attends to; -1 = no sliding window.
        logits_soft_cap: Soft cap of the scores; None = no soft cap.
        sm_scale: Factor that multiplies q.k before the softmax.
        has_sinks: Whether the layer has attention sinks.
        has_same_window_lefts: Whether all layers have the same `window_left`. Set by
            `infer_global_hyperparameters`; not compared.
        has_same_all_params: Whether all layers have the same parameters. Set by
            `infer_global_hyperparameters`; not compared.

    Source: vLLM `PerLayerParameters`.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False
    has_same_window_lefts: bool | None = dataclasses.field(default=None, compare=False)
    has_same_all_params: bool | None = dataclasses.field(default=None, compare=False)


def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters], *, strict: bool = True
) -> PerLayerParameters:
    """Return the parameters that all layers share, taken from the first layer.

    Args:
        per_layer_params: Parameters of each layer, by layer name.
        strict: Raise if layers disagree, as vLLM's first version does. False = record the disagreement in
            the result, as newer versions do.

    Returns:
        The first layer's parameters with both `has_same_` fields set.

    Raises:
        ValueError: If there are no layers, or `strict` is set and a layer differs from the first.

    Source: vLLM `infer_global_hyperparameters`.
    """
    require_type("per_layer_params", per_layer_params, Mapping, "layer name -> PerLayerParameters")
    require(len(per_layer_params) > 0, "per_layer_params", "have at least one layer", dict(per_layer_params))
    first_name, first = next(iter(per_layer_params.items()))
    differing = {name: params for name, params in per_layer_params.items() if params != first}
    rule = f"be the same in all layers ({first_name} has {_format_params(first)})"
    differing_layers = "; ".join(f"{name}: {_format_params(params)}" for name, params in differing.items())
    require(
        not (strict and differing),
        "window_left, logits_soft_cap, sm_scale, has_sinks",
        rule,
        differing_layers,
    )
    has_same_windows = all(params.window_left == first.window_left for params in per_layer_params.values())
    return dataclasses.replace(
        first, has_same_window_lefts=has_same_windows, has_same_all_params=not differing
    )


def choose_kv_cache_layout(
    requested: str | None = None, connector: str | None = None, default: str = "NHD"
) -> str:
    """Return the requested cache layout, else the one that the KV connector prefers, else the default.

    Args:
        requested: Layout that the user requested, or None.
        connector: Layout that the KV connector prefers, or None.
        default: Layout of the back end.

    Raises:
        ValueError: If one of them is neither "NHD" nor "HND".

    Source: vLLM `get_kv_cache_layout`, which reads the request from a global or an environment variable.
    """
    choices = {"requested": requested, "connector": connector, "default": default}
    layouts = {name: layout for name, layout in choices.items() if layout is not None}
    for name, layout in layouts.items():
        require_one_of(name, layout, KV_CACHE_LAYOUTS)
    return next(iter(layouts.values()))


def _format_params(params: PerLayerParameters) -> str:
    return str((params.window_left, params.logits_soft_cap, params.sm_scale, params.has_sinks))


PARTITION_SIZE = 512
MAX_V1_SEQ_LEN = 8192


class PagedAttentionVersion(NamedTuple):
    """Choice between vLLM's two paged-attention decode kernels.

    Attributes:
        use_v1: Use v1, where one thread block attends to the whole context.
        max_num_partitions: Maximum number of thread blocks that v2 splits a context over.
    """

    use_v1: bool
    max_num_partitions: int


def choose_paged_attention_version(max_seq_len: int, num_seqs: int, num_heads: int) -> PagedAttentionVersion:
    """Choose between vLLM's two decode kernels.

    V1 is used for contexts that fit one partition, and for contexts of up to 8192 keys if there are enough
    requests x heads to fill the GPU.

    Args:
        max_seq_len: Length of the longest request in tokens, at least 1.
        num_seqs: Number of requests.
        num_heads: Number of query heads.

    Raises:
        ValueError: If an argument is not an int, or `max_seq_len` is not positive.

    Source: vLLM `PagedAttention.forward_decode`.
    """
    max_seq_len, num_seqs, num_heads = python_ints(
        max_seq_len=max_seq_len, num_seqs=num_seqs, num_heads=num_heads
    )
    require_positive(max_seq_len=max_seq_len)
    num_partitions = -(-max_seq_len // PARTITION_SIZE)
    use_v1 = max_seq_len <= MAX_V1_SEQ_LEN and (num_partitions == 1 or num_seqs * num_heads > PARTITION_SIZE)
    return PagedAttentionVersion(use_v1, num_partitions)
