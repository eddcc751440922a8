"""Specs from a config.json's keys, as most families read them."""

from collections.abc import Collection, Mapping
from typing import Any

from jattn.masks import LocalStrided
from jattn.models.families.family import Keys
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.models.specs import ExpertsSpec, LayerSpec, MLPSpec, require_one_a_layer
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_positive, unsupported

FULL, SLIDING = "full_attention", "sliding_attention"


def attention(keys: Keys, **changes: Any) -> AttentionSpec:
    """A layer's attention; `changes` are an AttentionSpec's fields."""
    fields: dict[str, Any] = {
        "num_q_heads": keys["num_attention_heads"],
        "num_kv_heads": keys["num_key_value_heads"],
        "head_dim": keys["head_dim"],
        "scale": keys["head_dim"] ** -0.5,
    }
    return AttentionSpec(**fields | changes)


def llama_layer(keys: Keys, *, window: int | None = None, **changes: Any) -> LayerSpec:
    """A Llama's layer: a gated MLP, one rope for all.

    Args:
        keys: The config's.
        window: Keys that a query sees, itself included; None = all.
        **changes: Other fields of `LayerSpec`.
    """
    fields: dict[str, Any] = {"attention": attention(keys, window=window_of(window))}
    if "mlp" not in changes:
        fields["mlp"] = gated_mlp(keys)
    if "rope" not in changes:
        fields["rope"] = rope(keys)
    return LayerSpec(**fields | changes)


def gated_mlp(keys: Keys, *, has_bias: bool = False) -> MLPSpec:
    """A Llama's MLP, perhaps with biases."""
    size = keys["intermediate_size"]
    return MLPSpec(intermediate_size=size, hidden_act=keys["hidden_act"], has_bias=has_bias)


def plain_mlp(keys: Keys, *, has_bias: bool) -> MLPSpec:
    """An MLP of two products."""
    size = keys["intermediate_size"]
    return MLPSpec(intermediate_size=size, hidden_act=keys["hidden_act"], kind="plain", has_bias=has_bias)


def experts(keys: Keys, routing: Routing, **changes: Any) -> ExpertsSpec:
    """Experts as wide as the config's MLPs; `changes` are an ExpertsSpec's fields."""
    fields: dict[str, Any] = {
        "intermediate_size": keys["intermediate_size"],
        "num_experts": keys["num_experts"],
        "experts_per_token": keys["num_experts_per_tok"],
        "activation": keys["hidden_act"],
    }
    return ExpertsSpec(routing=routing, **fields | changes)


def is_rotated(keys: Keys, layer: int) -> bool:
    """Whether a layer has a rope: `no_rope_layers` says so, else all but each n-th have.

    Raises:
        ValueError: There is not one entry a layer.
    """
    said, count = keys["no_rope_layers"], keys["num_hidden_layers"]
    if not said:
        return not is_nth(keys, "no_rope_layer_interval", layer)
    require(len(said) >= count, "no_rope_layers", f"have one entry per layer ({count})", len(said))
    return bool(said[layer])  # 1 where a layer has a rope, whatever the name says


def is_nth(keys: Keys, name: str, layer: int) -> bool:
    """Whether a layer is one of each so many, as a key says: the last of them.

    Raises:
        ValueError: Not a positive number says so.
    """
    require_positive(**{name: keys[name]})
    return bool((layer + 1) % keys[name] == 0)


def window_of(size: int | None) -> tuple[int, int] | None:
    """A window that counts the query itself, as `AttentionSpec` has it.

    Raises:
        ValueError: It is not positive.
    """
    require(size is None or size > 0, "sliding_window", "be positive (None switches it off)", size)
    return None if size is None else (size - 1, 0)


def local_strided(keys: Keys, layer: int) -> LocalStrided | None:
    """What a layer's heads see of a text where each so-manieth is dense; None = everything before.

    Raises:
        NotImplementedError: The pattern has blocks of one size, vLLM's kernel of another.
    """
    size, kernel = keys["blocksparse_block_size"], keys["blocksparse_triton_kernel_block_size"]
    if size != kernel:
        what, way_out = (
            f"blocksparse_triton_kernel_block_size {kernel}",
            f"Supported: {size}, the blocksparse_block_size",
        )
        raise unsupported(what, "patterns have blocks of one size", way_out)
    every = keys["dense_attention_every_n_layers"]
    if every and (layer + 1) % every == 0:
        return None
    return LocalStrided(
        block_size=size,
        local_blocks=keys["blocksparse_num_local_blocks"],
        vert_stride=keys["blocksparse_vert_stride"],
        homo_head=bool(keys["blocksparse_homo_head_pattern"]),
    )


def layer_type(keys: Keys, layer: int, default: str, known: Collection[str] = (FULL, SLIDING)) -> str:
    """What `layer_types` says of a layer; the default where there is no such list.

    Raises:
        ValueError: There is not one entry a layer.
        NotImplementedError: The type is not one of the family's.
    """
    types = keys["layer_types"]
    if types is None:
        return default
    require_one_a_layer("layer_types", types, keys["num_hidden_layers"])
    if types[layer] not in known:
        supported = "Supported: " + ", ".join(known)
        raise unsupported(f"layer type {types[layer]!r}", "not implemented", supported)
    return types[layer]


def rope(keys: Keys, kind: str | None = None, *, interleaved: bool = False, is_partial: bool = False) -> Rope:
    """The rope of a layer of some type: one dictionary for all, or one a type.

    Args:
        keys: The config's.
        kind: The layer's type.
        interleaved: Pairs are neighbours.
        is_partial: The family may rotate a part of a head.

    Raises:
        ValueError: There are dictionaries by type, and none of this.
        NotImplementedError: A part of a head is to be rotated, which the family does not.
    """
    given: dict[Any, Any] = {**_said(keys["rope_parameters"]), **_said(keys["rope_scaling"])}
    context = keys["max_position_embeddings"]
    base = {key: keys[key] for key in ("rope_theta", "partial_rotary_factor") if keys[key] is not None}
    if keys["original_max_position_embeddings"]:
        context = keys["original_max_position_embeddings"]
        given.pop("original_max_position_embeddings", None)
    if any(isinstance(value, Mapping) for value in given.values()):
        rule = "hold one rope for all layers" if kind is None else f"have {kind!r}"
        require(kind in given, "rope_parameters", rule, sorted(given))
        given = given[kind]
        require(isinstance(given, Mapping), f"rope_parameters' {kind}", "be an object", repr(given))
    given = {**base, **_said(given)}
    part = given.get("partial_rotary_factor")
    if not is_partial and part not in (None, 1):
        raise unsupported(f"partial_rotary_factor {part}", "the family rotates whole heads", "Supported: 1")
    return Rope.from_hf(
        given,
        head_dim=keys["head_dim"],
        default_context=context,
        max_context=keys["max_position_embeddings"],
        interleaved=interleaved,
    )


def rope_by_type(keys: Keys, kind: str, theta: float) -> Rope:
    """A layer's rope where types of layers have their own; an older config's rope_scaling is of full ones.

    Args:
        keys: The config's.
        kind: The layer's type.
        theta: The base of the layer's type where its dictionary has none.

    Raises:
        ValueError: `rope_parameters` is one rope for all layers, which transformers would pass over, or the
            type's is no object.
    """
    by_type = _said(keys["rope_parameters"])
    is_for_all = not all(isinstance(value, Mapping) for value in by_type.values())
    require(kind in by_type or not is_for_all, "rope_parameters", f"have {kind!r}", sorted(by_type))
    own = by_type.get(kind)
    require(own is None or isinstance(own, Mapping), f"rope_parameters' {kind}", "be an object", repr(own))
    given = _said(own) or {"rope_type": "default"}
    if kind == FULL:
        given |= _said(keys["rope_scaling"])
    given.setdefault("rope_theta", theta)
    return rope({**keys, "rope_scaling": None, "rope_parameters": given})


def _said(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A rope's dictionary without its nulls: who says nothing hides no other key that says something."""
    return {key: value for key, value in (given or {}).items() if value is not None}


def alibi_slopes(num_heads: int, bias_max: float = 8) -> tuple[float, ...]:
    """ALiBi's slopes: `2 ** -(bias_max * i / n)` for i = 1..n, n the last power of two in num_heads.

    Heads beyond n take those of 2 n in its places of odd i.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-bias_max * i / below) for i in range(1, below + 1)]
    slopes += [2 ** (-bias_max * i / (2 * below)) for i in range(1, 2 * below, 2)]
    return tuple(slopes[:num_heads])
