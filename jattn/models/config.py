"""A decoder's configuration: Hugging Face's nouns, with every default filled in."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families import ARCHITECTURES, GEMMA_NUMBERS, LAYER_TYPES, read_hf
from jattn.models.layers import ACTIVATIONS
from jattn.models.rope import Rope
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_one_of, require_positive, unsupported


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder. Hashable: a static value for jit. Make it with `from_hf`.

    Attributes:
        model_type: "llama", "mistral", "qwen2", "qwen3" or "gemma2".
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_hidden_layers: Layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads.
        head_dim: Width of a head.
        hidden_act: The MLP's activation.
        rms_norm_eps: Added to the mean square in every norm.
        max_position_embeddings: The longest context, in tokens.
        tie_word_embeddings: The output projection is the embedding.
        attention_bias: The query, key and value projections have a bias.
        mlp_bias: The MLP's projections have one.
        sliding_window: Keys that a query of a sliding layer sees, itself included; None = all.
        layer_types: "full_attention" or "sliding_attention", one a layer.
        ropes: One a layer.
        query_pre_attn_scalar: Scores are divided by its square root; None = head_dim.
        attn_logit_softcapping: Soft cap of the scores; None = none.
        final_logit_softcapping: Soft cap of the logits; None = none.
        dtype: "float32", "bfloat16", "float16": what the checkpoint is meant to run in; None = not said.
        bos_token_id: First token of a text; None = none.
        eos_token_ids: Tokens that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    layer_types: tuple[str, ...]
    ropes: tuple[Rope, ...]
    query_pre_attn_scalar: float | None
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        require_one_of("model_type", self.model_type, ARCHITECTURES)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")
        require_positive(**{name: getattr(self, name) for name in sizes})
        require_positive(max_position_embeddings=self.max_position_embeddings)
        require(
            self.sliding_window is None or self.sliding_window > 0,
            "sliding_window",
            "be positive (None switches it off)",
            self.sliding_window,
        )
        if self.hidden_act not in ACTIVATIONS:
            supported = "Supported: " + ", ".join(ACTIVATIONS)
            raise unsupported(f"activation {self.hidden_act!r}", "not implemented", supported)
        for kind in set(self.layer_types) - set(LAYER_TYPES):
            supported = "Supported: " + ", ".join(LAYER_TYPES)
            raise unsupported(f"layer type {kind!r}", "not implemented", supported)
        for name in ("layer_types", "ropes"):
            rule = f"have one entry per layer ({self.num_hidden_layers})"
            got = len(getattr(self, name))
            require(got == self.num_hidden_layers, name, rule, got)
        self.attention_spec(0)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
        """Reads a config.json's dictionary, of transformers 4 or 5; what it lacks is as in transformers.

        Raises:
            ValueError: A size is missing or impossible.
            NotImplementedError: The architecture, activation, rope type or another part is not one of ours;
                the message lists those that are.
        """
        return cls(**read_hf(hf))

    def to_hf(self) -> dict[str, Any]:
        """What `from_hf` reads, in keys that transformers 4 and 5 both know."""
        hf = dataclasses.asdict(self)
        del hf["ropes"]
        eos = list(hf.pop("eos_token_ids"))
        hf |= {"architectures": [ARCHITECTURES[self.model_type]], "torch_dtype": hf.pop("dtype")}
        hf |= {
            "layer_types": list(self.layer_types),
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }
        if len({*self.ropes}) == 1:
            rope = self.ropes[0].to_hf()
            hf["rope_theta"] = rope.pop("rope_theta")
            hf["rope_scaling"] = None if self.ropes[0].rope_type == "default" else rope
        else:
            kinds = zip(self.layer_types, self.ropes, strict=True)
            hf["rope_parameters"] = {kind: rope.to_hf() for kind, rope in kinds}
        if self.model_type == "gemma2":
            hf["hidden_activation"] = hf["hidden_act"]
        else:
            for key in GEMMA_NUMBERS:
                del hf[key]
        if self.model_type.startswith("qwen"):
            hf["use_sliding_window"] = self.sliding_window is not None
        if self.model_type in ("llama", "mistral"):
            del hf["layer_types"]
        return hf

    @property
    def is_gemma(self) -> bool:
        """Four norms a layer with factors 1 + weight, and embeddings times sqrt(hidden_size)."""
        return self.model_type == "gemma2"

    @property
    def has_qk_norm(self) -> bool:
        """Queries and keys are normalised, head by head, before they are rotated."""
        return self.model_type == "qwen3"

    @property
    def attention_out_bias(self) -> bool:
        """The attention's output projection has a bias."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """What each layer's attention is."""
        return tuple(self.attention_spec(i) for i in range(self.num_hidden_layers))

    def attention_spec(self, layer: int) -> AttentionSpec:
        """The attention of a layer, counted from 0."""
        is_sliding = self.layer_types[layer] == "sliding_attention" and self.sliding_window is not None
        return AttentionSpec(
            num_q_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=(self.query_pre_attn_scalar or self.head_dim) ** -0.5,
            window=(self.sliding_window - 1, 0) if is_sliding and self.sliding_window else None,
            soft_cap=self.attn_logit_softcapping,
        )
