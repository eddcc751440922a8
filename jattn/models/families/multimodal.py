"""Multimodal models whose text model is a decoder of a supported family."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import NULLABLE, class_defaults
from jattn.models.families.family import Keys

# Architecture of each supported model_type, and model_type of its text_config if that has none.
MULTIMODAL_MODELS = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "llama4": ("Llama4ForConditionalGeneration", "llama4_text"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
    "llava": ("LlavaForConditionalGeneration", "llama"),
    "llava_next": ("LlavaNextForConditionalGeneration", "llama"),
    "internvl": ("InternVLForConditionalGeneration", "qwen2"),
    "aya_vision": ("AyaVisionForConditionalGeneration", "cohere2"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
    "glm4v": ("Glm4vForConditionalGeneration", "glm4v_text"),
}
# model_type of text_config, mapped to the keys of its family that the text model's class does not have.
_TEXT_TYPES: Mapping[str, Keys] = {
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {},  # a family of its own
    "glm4v_text": {
        "model_type": "glm4",
        "partial_rotary_factor": 1.0,
        "attention_bias": True,
        "head_dim": None,
    },
}
# Keys of older config.json files without text_config that do not belong to the text model.
_VISION_KEYS = (
    *("vision_config", "vision_start_token_id", "vision_end_token_id", "vision_token_id"),
    *("image_token_id", "video_token_id"),
)
_DTYPES = ("dtype", "torch_dtype")
# Top-level keys that take precedence over text_config's, as in transformers.
_OUTER_KEYS = (*_DTYPES, "bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
# Name prefixes of tensors that do not belong to the text model.
_NON_TEXT_MODULES = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "image_newline")
NON_TEXT_PREFIXES = (*_NON_TEXT_MODULES, *(f"model.{name}" for name in _NON_TEXT_MODULES))


def is_multimodal(hf: Keys) -> bool:
    """Return whether a config.json belongs to a supported multimodal model."""
    return _text_type(hf) is not None


def extract_text_config(hf: Keys) -> Keys:
    """Return the config.json of a multimodal model's text model; others are returned unchanged."""
    text_type = _text_type(hf)
    if text_type is None:
        return hf
    text = hf.get("text_config") or {}
    if not text and text_type in _TEXT_TYPES:
        text = {key: value for key, value in hf.items() if key not in _VISION_KEYS} | {
            "model_type": text_type
        }
    outer = {key: hf[key] for key in _OUTER_KEYS if hf.get(key) is not None}
    hidden = {
        "architectures",
        *(_DTYPES if outer.keys() & {*_DTYPES} else ()),
    }  # text_config's may be those of the base model
    values = {key: value for key, value in text.items() if key not in hidden}
    if "tie_word_embeddings" in outer:  # the outer model has the output projection, but either may tie it
        outer["tie_word_embeddings"] = bool(outer["tie_word_embeddings"] or text.get("tie_word_embeddings"))
    return _as_family_config({"model_type": text_type, **values, **outer})


def _as_family_config(text: Keys) -> Keys:
    """Return a text_config with its family's model_type, its class's defaults and a plain rope.

    For text, all sections of a multimodal rope (mrope) rotate alike, as a plain rope does.
    """
    family_keys = _TEXT_TYPES.get(text["model_type"])
    if family_keys is None:
        return text
    values = {key: value for key, value in text.items() if value is not None or key in NULLABLE}
    defaults = class_defaults(text["model_type"]) if family_keys else {}
    defaults = {key: value for key, value in defaults.items() if value is not None}
    keys = {**defaults, **family_keys, **values}
    for key in ("rope_scaling", "rope_parameters"):
        rope = keys.get(key)
        if isinstance(rope, Mapping):
            types = {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
            plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
            keys[key] = plain | types
    return keys | {"model_type": family_keys.get("model_type", text["model_type"])}


def drop_non_text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's tensors without vision towers and projectors."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(NON_TEXT_PREFIXES)}


def _text_type(hf: Keys) -> str | None:
    """Return the model_type of a multimodal model's text_config if it has none; None for other models."""
    names = {hf.get("model_type"), *(hf.get("architectures") or ())}
    for outer, (architecture, text_type) in MULTIMODAL_MODELS.items():
        if names & {outer, architecture}:
            return text_type
    return None
