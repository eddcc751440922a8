"""Models of text and more whose text part is a decoder of one of the families."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import NULL_IS_SILENCE, SIZES, check_kinds
from jattn.models.families.family import Keys
from pallas_kernels.checks import require

# model_type and architecture -> the text part's model_type where text_config does not say it.
WRAPPERS = {
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
# Names that a text part has for itself -> its family's, and what silence means where that is something else.
_TEXT_TYPES: Mapping[str, Keys] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {"model_type": "qwen3", "rope_theta": 500000.0, "max_position_embeddings": 128000},
}
# Of a text part transformers writes what differs from its class alone (LLaVA 1.5): by model_type, its SIZES.
_SIZES_OF = {
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
# What an older config.json, whose text part is the whole but for these, says of the rest.
_OF_THE_REST = (
    *("vision_config", "vision_start_token_id", "vision_end_token_id", "vision_token_id"),
    *("image_token_id", "video_token_id"),
)
_DTYPES = ("dtype", "torch_dtype")
# What the whole may say for its text part; it counts before what that says, as in transformers.
_OF_THE_WHOLE = (*_DTYPES, "bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
# Beginnings of the names of tensors that have no part in text.
_PASSED_OVER = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "image_newline")
PASSED_OVER = (*_PASSED_OVER, *(f"model.{name}" for name in _PASSED_OVER))


def is_wrapper(hf: Keys) -> bool:
    """Whether a config.json is of a model of text and more that is known here."""
    return _text_type(hf) is not None


def text_part(hf: Keys) -> Keys:
    """A config.json of text alone: of a model of text and more, its text part.

    Raises:
        ValueError: `text_config` is no object.
    """
    text_type = _text_type(hf)
    if text_type is None:
        return hf
    text = hf.get("text_config") or {}
    require(isinstance(text, Mapping), "text_config", "be an object", repr(text))
    check_kinds(text)
    own = f"{hf.get('model_type')}_text"
    if not text and own in _TEXT_TYPES:
        text = {key: value for key, value in hf.items() if key not in _OF_THE_REST} | {"model_type": own}
    outer = {key: hf[key] for key in _OF_THE_WHOLE if hf.get(key) is not None}
    hidden = {"architectures", *(_DTYPES if outer.keys() & {*_DTYPES} else ())}  # of the body alone, perhaps
    told = {key: value for key, value in text.items() if key not in hidden}
    if "tie_word_embeddings" in outer:  # the whole has the output projection, but either may tie it
        outer["tie_word_embeddings"] = bool(outer["tie_word_embeddings"] or text.get("tie_word_embeddings"))
    text_type = own if own in _TEXT_TYPES else text_type
    return _by_its_family({"model_type": text_type, **told, **outer})


def _by_its_family(text: Keys) -> Keys:
    """A text part by its family's name, its rope as text alone turns: the sections of images turn alike."""
    text = dict(zip(SIZES, _SIZES_OF.get(text["model_type"], ()), strict=False)) | {**text}
    if text["model_type"] not in _TEXT_TYPES:
        return text
    said = {key: value for key, value in text.items() if value is not None or key not in NULL_IS_SILENCE}
    keys = {**_TEXT_TYPES[text["model_type"]], **said}
    for key in ("rope_scaling", "rope_parameters"):
        given = keys.get(key)
        if isinstance(given, Mapping):
            kinds = {name: "default" for name in ("type", "rope_type") if given.get(name) == "mrope"}
            turned = {name: value for name, value in given.items() if not name.startswith("mrope_")}
            keys[key] = turned | kinds
    return keys | {"model_type": _TEXT_TYPES[text["model_type"]]["model_type"]}


def text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors that have a part in text."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PASSED_OVER)}


def _text_type(hf: Keys) -> str | None:
    said = {hf.get("model_type"), *(hf.get("architectures") or ())}
    return next((text for names, text in WRAPPERS.items() if said & {*names}), None)
