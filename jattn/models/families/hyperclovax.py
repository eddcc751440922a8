"""HyperCLOVA X: a Granite with norms around, whose logits are multiplied, not divided."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Keys
from jattn.models.families.granite import GRANITE, multipliers
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored

_LAYER = "model.layers.*"


def _model(keys: Keys) -> Mapping[str, Any]:
    return {**multipliers(keys), "logit_scale": keys["logits_scaling"]}


HYPERCLOVAX = dataclasses.replace(
    GRANITE,
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    defaults={
        **GRANITE.defaults,
        "attention_multiplier": lambda keys: (
            (keys["head_dim"] or keys["hidden_size"] // keys["num_attention_heads"]) ** -0.5
        ),
    },
    model=_model,
    norm_placement="around",
    only={"use_post_norm": ((True,), "norms stand around attention and MLP")},
    tensors={
        **LLAMA_TENSORS,
        "layers.*.post_attention_layernorm": Stored((f"{_LAYER}.post_norm1",)),
        "layers.*.pre_feedforward_layernorm": Stored((f"{_LAYER}.post_attention_layernorm",)),
        "layers.*.post_feedforward_layernorm": Stored((f"{_LAYER}.post_norm2",)),
    },
)
