"""Models of text and more whose text part is a decoder of one of the families."""

from collections.abc import Mapping
from typing import Any

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
}
# What the whole may say for its text part.
_OF_THE_WHOLE = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
# Beginnings of tensors' names -> what they are in a checkpoint of text alone.
_RENAMED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_PASSED_OVER = ("vision_tower.", "vision_model.", "multi_modal_projector.", "image_newline")
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
    outer = {key: hf[key] for key in _OF_THE_WHOLE if hf.get(key) is not None}
    told = {key: value for key, value in text.items() if value is not None or key not in outer}
    told.pop("architectures", None)  # perhaps of the body alone
    return {**outer, "model_type": text_type, **told}


def text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors that have a part in text, by the names that they have where there is no more."""
    named: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith(PASSED_OVER):
            continue
        old = next((old for old in _RENAMED if name.startswith(old)), None)
        named[name if old is None else _RENAMED[old] + name.removeprefix(old)] = tensor
    return named


def _text_type(hf: Keys) -> str | None:
    said = {hf.get("model_type"), *(hf.get("architectures") or ())}
    return next((text for names, text in WRAPPERS.items() if said & {*names}), None)
