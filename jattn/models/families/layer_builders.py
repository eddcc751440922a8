"""Functions that build layer specifications from config.json keys, shared by most families."""

from collections.abc import Collection, Mapping
from typing import Any

from jattn.masks import LocalStrided
from jattn.models.families.family import Keys
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.models.specs import ExpertsSpec, LayerSpec, MLPSpec, NormSpec, QKNorm
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, unsupported

FULL, SLIDING = "full_attention", "sliding_attention"


def attention(keys: Keys, **changes: Any) -> AttentionSpec:
    """Return a layer's attention specification; `changes` are fields of `AttentionSpec`."""
    fields: dict[str, Any] = {
        "num_q_heads": keys["num_attention_heads"],
        "num_kv_heads": keys["num_key_value_heads"],
        "head_dim": keys["head_dim"],
        "scale": keys["head_dim"] ** -0.5,
    }
    return AttentionSpec(**fields | changes)


_ATTENTION_FIELDS = ("num_kv_heads", "scale", "soft_cap", "chunk_size", "sparsity")


def llama_layer(keys: Keys, *, window: int | None = None, **changes: Any) -> LayerSpec:
    """Return a Llama layer: a gated MLP, and the same rotary embedding in all layers.

    Projections have biases if the family reads the keys `attention_bias` and `mlp_bias` and they are set.

    Args:
        keys: Keys of config.json.
        window: Number of tokens that a query attends to, including its own; None = all preceding.
        **changes: Fields of `LayerSpec` and its `AttentionSpec` that differ.
    """
    has_bias = bool(keys.get("attention_bias"))
    spec = {name: changes.pop(name) for name in _ATTENTION_FIELDS if name in changes}
    fields: dict[str, Any] = {
        "attention": attention(keys, window=window_bounds(window), **spec),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
    }
    if "mlp" not in changes:
        fields["mlp"] = gated_mlp(keys)
    if "rope" not in changes:
        fields["rope"] = rope(keys)
    return LayerSpec(**fields | changes)


def typed_layer(keys: Keys, attention_type: str, **changes: Any) -> LayerSpec:
    """Return a Llama layer with the rotary embedding of its type, and a window if the type is SLIDING.

    Args:
        keys: Keys of config.json.
        attention_type: Type of the layer, FULL or SLIDING.
        **changes: See `llama_layer`.
    """
    if "rope" not in changes:
        changes["rope"] = rope(keys, attention_type)
    window = keys["sliding_window"] if attention_type == SLIDING else None
    return llama_layer(keys, window=window, **changes)


def qk_norm(keys: Keys, kind: str = "rms", **fields: Any) -> QKNorm:
    """Return the norm of queries and keys per head; `fields` are fields of `QKNorm`."""
    return QKNorm(norm=NormSpec(kind, keys["rms_norm_eps"]), **fields)


def gated_mlp(keys: Keys, size: int | None = None, **fields: Any) -> MLPSpec:
    """Return the specification of Llama's gated MLP; `fields` are fields of `MLPSpec`.

    Args:
        keys: Keys of config.json.
        size: Width; None = intermediate_size.
        **fields: Fields of `MLPSpec` that differ.
    """
    default = {"hidden_act": keys["hidden_act"], "has_bias": bool(keys.get("mlp_bias"))}
    return MLPSpec(intermediate_size=keys["intermediate_size"] if size is None else size, **default | fields)


def plain_mlp(keys: Keys, **fields: Any) -> MLPSpec:
    """Return the specification of an MLP without a gate; `fields` are fields of `MLPSpec`."""
    return gated_mlp(keys, kind="plain", **fields)


def experts(keys: Keys, routing: Routing, **changes: Any) -> ExpertsSpec:
    """Return a mixture of experts of width intermediate_size; `changes` are fields of `ExpertsSpec`."""
    fields: dict[str, Any] = {
        "intermediate_size": keys["intermediate_size"],
        "num_experts": keys["num_experts"],
        "experts_per_token": keys["num_experts_per_tok"],
        "activation": keys["hidden_act"],
    }
    return ExpertsSpec(routing=routing, **fields | changes)


def layer_has_rope(keys: Keys, layer: int) -> bool:
    """Return whether a layer has a rotary embedding, by `no_rope_layers` or else `no_rope_layer_interval`."""
    entries = keys["no_rope_layers"]
    if not entries:
        return not is_nth_layer(keys, "no_rope_layer_interval", layer)
    return bool(entries[layer])  # despite the name, 1 means that the layer has a rotary embedding


def is_nth_layer(keys: Keys, name: str, layer: int) -> bool:
    """Return whether a layer's number, counted from 1, is a multiple of a key's value."""
    return bool((layer + 1) % keys[name] == 0)


def window_bounds(size: int | None) -> tuple[int, int] | None:
    """Return `AttentionSpec`'s window for a sliding window that includes the query's own token."""
    return None if size is None else (size - 1, 0)


def local_strided(keys: Keys, layer: int) -> LocalStrided | None:
    """Return Phi-3-small's block-sparse pattern of a layer, or None if the layer is dense.

    Raises:
        NotImplementedError: If the pattern and vLLM's kernel have different block sizes.
    """
    size, kernel = keys["blocksparse_block_size"], keys["blocksparse_triton_kernel_block_size"]
    if size != kernel:
        feature, fix = (
            f"blocksparse_triton_kernel_block_size {kernel}",
            "Set both to the same size in config.json",
        )
        raise unsupported(feature, f"it differs from blocksparse_block_size {size}", fix)
    dense_interval = keys["dense_attention_every_n_layers"]
    if dense_interval and (layer + 1) % dense_interval == 0:
        return None
    return LocalStrided(
        block_size=size,
        local_blocks=keys["blocksparse_num_local_blocks"],
        vert_stride=keys["blocksparse_vert_stride"],
        homo_head=bool(keys["blocksparse_homo_head_pattern"]),
    )


def layer_type(keys: Keys, layer: int, default: str, supported: Collection[str] = (FULL, SLIDING)) -> str:
    """Return a layer's entry of `layer_types`, or the default if there is no such list.

    Raises:
        NotImplementedError: If the family does not support the type.
    """
    types = keys["layer_types"]
    if types is None:
        return default
    if types[layer] not in supported:
        fix = "Supported: " + ", ".join(supported)
        raise unsupported(f"layer type {types[layer]!r}", "not implemented", fix)
    return types[layer]


def rope(
    keys: Keys, layer_type: str | None = None, *, interleaved: bool = False, is_partial: bool = False
) -> Rope:
    """Return the rotary embedding of a layer, from one dictionary for all layers or one per layer type.

    Args:
        keys: Keys of config.json.
        layer_type: Type of the layer, such as "full_attention".
        interleaved: Whether pairs are adjacent elements.
        is_partial: Whether the family may rotate a part of each head.

    Raises:
        ValueError: If there is a dictionary per layer type and none for this one.
        NotImplementedError: If partial_rotary_factor is set and the family rotates full heads.
    """
    parameters: dict[Any, Any] = {
        **_without_nulls(keys["rope_parameters"]),
        **_without_nulls(keys["rope_scaling"]),
    }
    context = keys["max_position_embeddings"]
    base = {key: keys[key] for key in ("rope_theta", "partial_rotary_factor") if keys[key] is not None}
    if keys["original_max_position_embeddings"]:
        context = keys["original_max_position_embeddings"]
        parameters.pop("original_max_position_embeddings", None)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        rule = "hold one rope for all layers" if layer_type is None else f"have {layer_type!r}"
        require(layer_type in parameters, "rope_parameters", rule, sorted(parameters))
        parameters = parameters[layer_type]
    parameters = {**base, **_without_nulls(parameters)}
    fraction = parameters.get("partial_rotary_factor")
    if not is_partial and fraction not in (None, 1):
        reason = "the family rotates full heads"
        raise unsupported(f"partial_rotary_factor {fraction}", reason, "Supported: 1")
    return Rope.from_hf(
        parameters,
        head_dim=keys["head_dim"],
        default_context=context,
        max_context=keys["max_position_embeddings"],
        interleaved=interleaved,
    )


def rope_by_type(keys: Keys, layer_type: str, theta: float) -> Rope:
    """Return the rotary embedding of a layer in families with one per layer type.

    rope_scaling of older configs applies to full-attention layers.

    Args:
        keys: Keys of config.json.
        layer_type: Type of the layer, such as "full_attention".
        theta: Base of the wavelengths if the type's dictionary has none.

    Raises:
        ValueError: If `rope_parameters` is one dictionary for all layers, which transformers would ignore.
    """
    by_type = _without_nulls(keys["rope_parameters"])
    is_for_all = not all(isinstance(value, Mapping) for value in by_type.values())
    require(
        layer_type in by_type or not is_for_all, "rope_parameters", f"have {layer_type!r}", sorted(by_type)
    )
    parameters = _without_nulls(by_type.get(layer_type)) or {"rope_type": "default"}
    if layer_type == FULL:
        parameters |= _without_nulls(keys["rope_scaling"])
    parameters.setdefault("rope_theta", theta)
    return rope({**keys, "rope_scaling": None, "rope_parameters": parameters})


def _without_nulls(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Drop the nulls of a rope dictionary, so that they do not override values of other keys."""
    return {key: value for key, value in (parameters or {}).items() if value is not None}


def alibi_slopes(num_heads: int, bias_max: float = 8) -> tuple[float, ...]:
    """Return ALiBi's slopes: `2 ** -(bias_max * i / n)` for i = 1..n, the last power of two in num_heads.

    Further heads get the slopes of 2 n heads for odd i.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-bias_max * i / below) for i in range(1, below + 1)]
    slopes += [2 ** (-bias_max * i / (2 * below)) for i in range(1, 2 * below, 2)]
    return tuple(slopes[:num_heads])
