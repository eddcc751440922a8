"""A decoder's configuration, read from config.json."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jattn.models.families import (
    FAMILIES,
    Family,
    extract_text_config,
    fill_defaults,
    find_family,
    normalize_config,
    served_keys,
    token_ids,
)
from jattn.models.rope import Rope
from jattn.models.specs import LayerSpec, NormSpec
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require

_COPIED_KEYS = (  # config.json keys that are fields of DecoderConfig
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "bos_token_id",
)

VOCAB_PADDING = 64  # each device's shard of a padded vocabulary is a multiple of this, as in vLLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The configuration of a decoder. Hashable: static for jit. Create it with `from_hf`.

    Attributes:
        model_type: Name of the family, such as "llama".
        vocab_size: Number of tokens in the vocabulary.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key/value heads, including replicas.
        head_dim: Width of a head.
        layers: Specification of each layer.
        norm: Kind and epsilon of every norm of width hidden_size.
        norm_placement: Placement of a layer's norms: "before" attention and MLP, "around" or "after" them;
            "parallel": one before both, which run side by side; "parallel_separate_norms": one before each of
            these.
        residual_after_norm: Whether attention and MLP are added to their norm's output instead of its input.
        max_position_embeddings: Maximum context in tokens: the key's value, or what the ropes are scaled for.
        tie_word_embeddings: Whether the output projection is the embedding.
        residual_scale: Multiplier of the outputs of attention and MLP; None = no scaling.
        embedding_scale: Multiplier of the embeddings, rounded to their dtype; None = no scaling.
        has_embedding_norm: Whether a norm follows the embedding.
        position_offset: Row of position 0 in the learned position embeddings; None = the model has none.
        has_head_bias: Whether the output projection has a bias.
        logit_scale: Multiplier of the logits; None = no scaling.
        final_logit_softcapping: Soft cap of the logits; None = no soft cap.
        suppressed_token_ids: Tokens that are never generated: their logits are the lowest finite number.
        dtype: Dtype that the checkpoint is meant to run in: "float32", "bfloat16" or "float16"; None =
            config.json has no dtype.
        bos_token_id: First token of a sequence; None = the model has none.
        eos_token_ids: Tokens that end a sequence.
        source: config.json as a JSON object with sorted keys.
        tp: Number of devices that heads are sharded over (`with_mesh`).
        cp: Number of devices per tp shard. MLP widths and the vocabulary are sharded over all tp * cp
            devices.
        num_kv_head_replicas: Number of consecutive kv heads that are copies of the same head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    norm_placement: str = "before"
    residual_after_norm: bool = False
    residual_scale: float | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_scale: float | None = None
    has_embedding_norm: bool = False
    position_offset: int | None = None
    has_head_bias: bool = False
    logit_scale: float | None = None
    final_logit_softcapping: float | None = None
    suppressed_token_ids: tuple[int, ...] = ()
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    source: str = dataclasses.field(repr=False)
    tp: int = 1
    cp: int = 1
    num_kv_head_replicas: int = 1

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
        """Read a config.json dictionary of transformers 4 or 5, with transformers' defaults for missing keys.

        Raises:
            ValueError: If sizes do not fit each other, or keys are ambiguous.
            NotImplementedError: If the architecture, activation, rope type or another part is not supported,
                or a key would change the result. The message names it and what is supported.
            ImportError: If transformers is not installed.
        """
        hf = extract_text_config(hf)
        family = find_family(hf)
        hf = normalize_config(hf, family)
        keys = fill_defaults(hf, family, served_keys())
        fields = {name: keys[name] for name in _COPIED_KEYS} | {"norm_placement": family.norm_placement}
        layers = tuple(family.build_layer(keys, layer) for layer in range(keys["num_hidden_layers"]))
        fields["max_position_embeddings"] = _max_context(keys["max_position_embeddings"], layers)
        return cls(
            model_type=family.model_type,
            norm=NormSpec(family.norm, keys["rms_norm_eps"]),
            layers=layers,
            tie_word_embeddings=bool(keys["tie_word_embeddings"]),
            dtype=keys["torch_dtype"],
            eos_token_ids=token_ids(keys["eos_token_id"]),
            source=json.dumps(hf, sort_keys=True),
            **{**fields, **family.config_fields(keys)},
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json dictionary of this configuration, for `from_hf` and transformers.

        Raises:
            ValueError: If a field was replaced and its key was not. Use
                `DecoderConfig.from_hf(config.to_hf() | {...})` instead.
        """
        hf: dict[str, Any] = json.loads(self.source)
        original = DecoderConfig.from_hf(hf).with_mesh(self.tp, self.cp)
        fields = [field.name for field in dataclasses.fields(self)]
        changed = [name for name in fields if getattr(self, name) != getattr(original, name)]
        rule = "match its config.json (change keys with from_hf, not fields)"
        require(not changed, "config", rule, ", ".join(f"{name} {getattr(self, name)}" for name in changed))
        return hf

    def with_mesh(self, tp: int, cp: int = 1) -> "DecoderConfig":
        """Return the configuration of the same decoder sharded over a mesh.

        Where there are fewer kv heads than tp devices, kv heads are replicated so that each device has one.

        Args:
            tp: Number of devices that heads are sharded over. Divides the number of query heads; divides the
                number of kv heads or is a multiple of it.
            cp: Number of devices per tp shard.
        """
        replicas = max(tp // self.num_key_value_heads, 1)
        layers = []
        for layer in self.layers:
            num_kv_heads = layer.attention.num_kv_heads * replicas
            attention = dataclasses.replace(layer.attention, num_kv_heads=num_kv_heads)
            layers.append(dataclasses.replace(layer, attention=attention))
        return dataclasses.replace(
            self,
            layers=tuple(layers),
            num_key_value_heads=self.num_key_value_heads * replicas,
            num_kv_head_replicas=replicas,
            tp=tp,
            cp=cp,
        )

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding. Rows after the vocabulary are zeros and belong to no token."""
        num_shards = self.tp * self.cp
        unit = VOCAB_PADDING * num_shards
        return self.vocab_size if self.vocab_size % num_shards == 0 else -(-self.vocab_size // unit) * unit

    @property
    def family(self) -> Family:
        """The model family, from the registry."""
        return FAMILIES[self.model_type]

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Rotary embedding per layer; None = the layer has none."""
        return tuple(layer.rope for layer in self.layers)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Attention specification per layer."""
        return tuple(layer.attention for layer in self.layers)

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the attention specification of a layer, counted from 0."""
        return self.layers[layer].attention


def _max_context(max_position_embeddings: int, layers: tuple[LayerSpec, ...]) -> int:
    """Return the context that all ropes are scaled for, and at least max_position_embeddings."""
    ropes = (layer.rope for layer in layers if layer.rope is not None)
    scaled = (rope.scaled_context(max_position_embeddings) for rope in ropes)
    shortest = min((length for length in scaled if length is not None), default=max_position_embeddings)
    return max(max_position_embeddings, shortest)
