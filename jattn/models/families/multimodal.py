"""Multimodal models whose text model is a decoder of a supported family."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import NULL_MEANS_DEFAULT, SIZES, check_types
from jattn.models.families.family import Keys
from pallas_kernels.checks import require

# model_type and architecture, mapped to the text model's model_type if text_config has none.
MULTIMODAL_MODELS = {
    ("gemma3", "Gemma3ForConditionalGeneration"): "gemma3_text",
    ("llama4", "Llama4ForConditionalGeneration"): "llama4_text",
    ("mistral3", "Mistral3ForConditionalGeneration"): "mistral",
    ("llava", "LlavaForConditionalGeneration"): "llama",
    ("llava_next", "LlavaNextForConditionalGeneration"): "llama",
    ("internvl", "InternVLForConditionalGeneration"): "qwen2",
    ("aya_vision", "AyaVisionForConditionalGeneration"): "cohere2",
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"): "qwen2",
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"): "qwen2",
    ("qwen3_vl", "Qwen3VLForConditionalGeneration"): "qwen3",
}
_QWEN2_VL: Keys = {
    "model_type": "qwen2",
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
}
# model_type of text_config, mapped to the family's keys: its model_type, and defaults that differ.
_TEXT_TYPES: Mapping[str, Keys] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {"model_type": "qwen3", "rope_theta": 500000.0, "max_position_embeddings": 128000},
}
# Default SIZES by model_type: transformers may write only the values of text_config that differ (LLaVA 1.5).
_DEFAULT_SIZES = {
    "llama": (32000, 4096, 11008, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
    "qwen3": (151936, 4096, 22016, 32, 32),
    "cohere2": (256000, 8192, 22528, 40, 64),
    "llama4_text": (202048, 5120, 8192, 48, 40),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32),
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
    """Return the config.json of a multimodal model's text model; others are returned unchanged.

    Raises:
        ValueError: If `text_config` is not an object.
    """
    text_type = _text_type(hf)
    if text_type is None:
        return hf
    text = hf.get("text_config") or {}
    require(isinstance(text, Mapping), "text_config", "be an object", repr(text))
    check_types(text)
    own_type = f"{hf.get('model_type')}_text"
    if not text and own_type in _TEXT_TYPES:
        text = {key: value for key, value in hf.items() if key not in _VISION_KEYS} | {"model_type": own_type}
    outer = {key: hf[key] for key in _OUTER_KEYS if hf.get(key) is not None}
    hidden = {
        "architectures",
        *(_DTYPES if outer.keys() & {*_DTYPES} else ()),
    }  # text_config's may be those of the base model
    values = {key: value for key, value in text.items() if key not in hidden}
    if "tie_word_embeddings" in outer:  # the outer model has the output projection, but either may tie it
        outer["tie_word_embeddings"] = bool(outer["tie_word_embeddings"] or text.get("tie_word_embeddings"))
    text_type = own_type if own_type in _TEXT_TYPES else text_type
    return _as_family_config({"model_type": text_type, **values, **outer})


def _as_family_config(text: Keys) -> Keys:
    """Return a text_config with its family's model_type and a plain rope.

    For text, all sections of a multimodal rope (mrope) rotate alike, as a plain rope does.
    """
    text = dict(zip(SIZES, _DEFAULT_SIZES.get(text["model_type"], ()), strict=False)) | {**text}
    if text["model_type"] not in _TEXT_TYPES:
        return text
    values = {key: value for key, value in text.items() if value is not None or key not in NULL_MEANS_DEFAULT}
    keys = {**_TEXT_TYPES[text["model_type"]], **values}
    for key in ("rope_scaling", "rope_parameters"):
        rope = keys.get(key)
        if isinstance(rope, Mapping):
            types = {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
            plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
            keys[key] = plain | types
    return keys | {"model_type": _TEXT_TYPES[text["model_type"]]["model_type"]}


def drop_non_text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's tensors without vision towers and projectors."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(NON_TEXT_PREFIXES)}


def _text_type(hf: Keys) -> str | None:
    names = {hf.get("model_type"), *(hf.get("architectures") or ())}
    return next((text_type for keys, text_type in MULTIMODAL_MODELS.items() if names & {*keys}), None)
