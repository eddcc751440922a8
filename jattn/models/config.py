"""A decoder's configuration: what its layers are, and the config.json that says so."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jattn.models.families import FAMILIES, Family, family_of, filled, normalised, text_part, token_ids
from jattn.models.families.config_keys import check_kinds
from jattn.models.rope import Rope
from jattn.models.specs import NORM_PLACEMENTS, LayerSpec, NormSpec, require_one_a_layer
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_one_of, require_positive

_TAKEN = (  # as they are
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "bos_token_id",
)

VOCAB_PADDING = 64  # a device's part of a padded vocabulary is a multiple of it, as in vLLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder. Hashable: a static value for jit. Make it with `from_hf`.

    Attributes:
        model_type: Of the family, as "llama".
        vocab_size: Tokens.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads, replicas among them.
        head_dim: Width of a head.
        layers: What each layer is.
        norm: Every norm of width hidden_size.
        norm_placement: "before" attention and MLP, "around" or "after" them; "parallel": one before both,
            which stand side by side; "parallel_apart": one before each of those.
        adds_to_normed: Attention and MLP are added to what their norm gave, not to what it was given.
        max_position_embeddings: The longest context, in tokens: the key's, or what ropes are scaled for.
        tie_word_embeddings: The output projection is the embedding.
        residual_scale: What attention and MLP give is multiplied by before it is added; None = nothing.
        embedding_scale: What embeddings are multiplied by, rounded to their dtype; None = nothing.
        has_embedding_norm: A norm stands behind the embedding.
        position_offset: Positions have learned embeddings, and this is the row of position 0; None = they
            have none.
        has_head_bias: The output projection has a bias.
        logit_scale: What logits are multiplied by; None = nothing.
        final_logit_softcapping: Soft cap of the logits; None = none.
        hidden_tokens: Tokens that are never said: their logits are the lowest finite number.
        dtype: "float32", "bfloat16", "float16": what the checkpoint is meant to run in; None = not said.
        bos_token_id: First token of a text; None = none.
        eos_token_ids: Tokens that end a text.
        source: The config.json, as a JSON object with sorted keys.
        tp: Devices that heads fall into equal parts for (`spread_over`).
        cp: Devices for each of these parts, that widths and the vocabulary fall into equal parts for, too.
        num_kv_head_replicas: So many kv heads, one behind the other, are the same one.
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
    adds_to_normed: bool = False
    residual_scale: float | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_scale: float | None = None
    has_embedding_norm: bool = False
    position_offset: int | None = None
    has_head_bias: bool = False
    logit_scale: float | None = None
    final_logit_softcapping: float | None = None
    hidden_tokens: tuple[int, ...] = ()
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    source: str = dataclasses.field(repr=False)
    tp: int = 1
    cp: int = 1
    num_kv_head_replicas: int = 1

    def __post_init__(self) -> None:
        require_one_of("model_type", self.model_type, FAMILIES)
        require_one_of("norm_placement", self.norm_placement, NORM_PLACEMENTS)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
            require_positive(**{name: getattr(self, name)})
        if self.final_logit_softcapping is not None:  # of 0 all logits would be 0
            require_positive(final_logit_softcapping=self.final_logit_softcapping)
        require_one_a_layer("layers", self.layers, self.num_hidden_layers)
        rule = f"lie in [0, {self.vocab_size})"
        for token in self.hidden_tokens:
            require(0 <= token < self.vocab_size, "a hidden token", rule, token)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
        """Reads a config.json's dictionary, of transformers 4 or 5; what it lacks is as in transformers.

        Raises:
            ValueError: A size is missing or impossible, or a value is of another kind than it should be.
            NotImplementedError: The architecture, activation, rope type or another part is not one of ours,
                or no decoder here knows a key; the message names it, and what is supported.
        """
        check_kinds(hf)
        hf = text_part(hf)
        family = family_of(hf)
        hf = normalised(hf, family)
        keys = filled(hf, family)
        fields = {name: keys[name] for name in _TAKEN} | {"norm_placement": family.norm_placement}
        layers = tuple(family.layer(keys, layer) for layer in range(keys["num_hidden_layers"]))
        fields["max_position_embeddings"] = _longest_context(keys["max_position_embeddings"], layers)
        return cls(
            model_type=family.model_type,
            norm=NormSpec(family.norm, keys["rms_norm_eps"]),
            layers=layers,
            tie_word_embeddings=bool(keys["tie_word_embeddings"]),
            dtype=keys["torch_dtype"],
            eos_token_ids=token_ids(keys["eos_token_id"]),
            source=json.dumps(hf, sort_keys=True),
            **{**fields, **family.model(keys)},
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that says this, as `from_hf` and transformers read it.

        Raises:
            ValueError: A field was replaced without its key: `DecoderConfig.from_hf(config.to_hf() | {...})`.
        """
        hf: dict[str, Any] = json.loads(self.source)
        again = DecoderConfig.from_hf(hf).spread_over(self.tp, self.cp)
        fields = [field.name for field in dataclasses.fields(self)]
        changed = [name for name in fields if getattr(self, name) != getattr(again, name)]
        rule = "be what its config.json says (change keys with from_hf, not fields)"
        require(not changed, "config", rule, ", ".join(f"{name} {getattr(self, name)}" for name in changed))
        return hf

    def spread_over(self, tp: int, cp: int = 1) -> "DecoderConfig":
        """The decoder as so many devices have it: it computes the same.

        kv heads that are fewer than the devices stand there so often that each device has one.

        Args:
            tp: A divisor of the query heads; of the kv heads or a multiple of them.
            cp: So many devices have each part of the heads.
        """
        replicas = max(tp // self.num_key_value_heads, 1)
        spread = lambda spec: dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads * replicas)
        each = (dataclasses.replace(one, attention=spread(one.attention)) for one in self.layers)
        counts: dict[str, Any] = {"num_key_value_heads": self.num_key_value_heads * replicas}
        return dataclasses.replace(
            self, layers=tuple(each), num_kv_head_replicas=replicas, tp=tp, cp=cp, **counts
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: those behind the vocabulary are zeros, and no token is theirs."""
        parts = self.tp * self.cp
        unit = VOCAB_PADDING * parts
        return self.vocab_size if self.vocab_size % parts == 0 else -(-self.vocab_size // unit) * unit

    @property
    def family(self) -> Family:
        """What it has in common with its like."""
        return FAMILIES[self.model_type]

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Each layer's rope; None = it does not rotate."""
        return tuple(layer.rope for layer in self.layers)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """What each layer's attention is."""
        return tuple(layer.attention for layer in self.layers)

    def attention_spec(self, layer: int) -> AttentionSpec:
        """The attention of a layer, counted from 0."""
        return self.layers[layer].attention


def _longest_context(said: int, layers: tuple[LayerSpec, ...]) -> int:
    """What the ropes are scaled for, the shortest of it where they differ, and never less than is said."""
    scaled = (layer.rope.longest(said) for layer in layers if layer.rope is not None)
    return max(said, min((length for length in scaled if length is not None), default=said))
