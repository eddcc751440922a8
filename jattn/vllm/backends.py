"""What the layers of a model must agree on."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jattn.batch.int_arrays import python_ints
from pallas_kernels.checks import require, require_one_of, require_positive, require_type

KV_CACHE_LAYOUTS = ("NHD", "HND")


@dataclasses.dataclass(frozen=True)
class PerLayerParameters:
    """The attention parameters of a layer that some back ends take once for all layers.

    Attributes:
        window_left: Neighbours seen to the left; -1 = all of them.
        logits_soft_cap: None = off.
        sm_scale: Multiplies q.k.
        has_sinks: The layer's softmax has sinks.
        has_same_window_lefts: Set by `infer_global_hyperparameters`; not compared.
        has_same_all_params: Set by `infer_global_hyperparameters`; not compared.

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
    """The parameters that all layers share: those of the first.

    Args:
        per_layer_params: Of each layer, by name.
        strict: Raise where layers disagree, as vLLM's first version did. False: only record it, as now.

    Returns:
        The first layer's, with both `has_same_` fields set.

    Raises:
        ValueError: There is no layer, or, when strict, a layer differs from the first.

    Source: vLLM `infer_global_hyperparameters`.
    """
    require_type("per_layer_params", per_layer_params, Mapping, "layer name -> PerLayerParameters")
    require(len(per_layer_params) > 0, "per_layer_params", "have at least one layer", dict(per_layer_params))
    first_name, first = next(iter(per_layer_params.items()))
    others = {name: params for name, params in per_layer_params.items() if params != first}
    rule = f"be the same in all layers ({first_name} has {_shown(first)})"
    named = "; ".join(f"{name}: {_shown(params)}" for name, params in others.items())
    require(not (strict and others), "window_left, logits_soft_cap, sm_scale, has_sinks", rule, named)
    has_same_windows = all(params.window_left == first.window_left for params in per_layer_params.values())
    return dataclasses.replace(first, has_same_window_lefts=has_same_windows, has_same_all_params=not others)


def choose_kv_cache_layout(
    requested: str | None = None, connector: str | None = None, default: str = "NHD"
) -> str:
    """The cache layout: the one requested, else the one a KV connector prefers, else the default.

    Raises:
        ValueError: One of them is neither "NHD" nor "HND".

    Source: vLLM `get_kv_cache_layout`, whose request is a global or an environment variable.
    """
    choices = {"requested": requested, "connector": connector, "default": default}
    given = {name: layout for name, layout in choices.items() if layout is not None}
    for name, layout in given.items():
        require_one_of(name, layout, KV_CACHE_LAYOUTS)
    return next(iter(given.values()))


def _shown(params: PerLayerParameters) -> str:
    return str((params.window_left, params.logits_soft_cap, params.sm_scale, params.has_sinks))


PARTITION_SIZE = 512
MAX_V1_SEQ_LEN = 8192


class PagedAttentionVersion(NamedTuple):
    """Whether one thread block attends to a whole context (v1), and how many share it otherwise (v2)."""

    use_v1: bool
    max_num_partitions: int


def choose_paged_attention_version(max_seq_len: int, num_seqs: int, num_heads: int) -> PagedAttentionVersion:
    """Chooses as vLLM does between its two decode kernels.

    V1 serves contexts that fit a partition, and those up to 8192 keys where requests x heads fill the GPU.

    Source: vLLM `PagedAttention.forward_decode`.
    """
    max_seq_len, num_seqs, num_heads = python_ints(
        max_seq_len=max_seq_len, num_seqs=num_seqs, num_heads=num_heads
    )
    require_positive(max_seq_len=max_seq_len)
    num_partitions = -(-max_seq_len // PARTITION_SIZE)
    use_v1 = max_seq_len <= MAX_V1_SEQ_LEN and (num_partitions == 1 or num_seqs * num_heads > PARTITION_SIZE)
    return PagedAttentionVersion(use_v1, num_partitions)
