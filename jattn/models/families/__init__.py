"""The families of decoders: a file and a line each."""

from collections.abc import Mapping

from jattn.models.families.bloom import BLOOM
from jattn.models.families.family import Family, Keys
from jattn.models.families.gemma import GEMMA
from jattn.models.families.gemma2 import GEMMA2
from jattn.models.families.gemma3 import GEMMA3
from jattn.models.families.gpt_oss import GPT_OSS
from jattn.models.families.keys import filled, normalised, token_ids
from jattn.models.families.llama import LLAMA
from jattn.models.families.llama4 import LLAMA4
from jattn.models.families.mistral import MISTRAL
from jattn.models.families.mixtral import MIXTRAL
from jattn.models.families.mpt import MPT
from jattn.models.families.phi3 import PHI3
from jattn.models.families.phi3small import PHI3SMALL
from jattn.models.families.qwen2 import QWEN2
from jattn.models.families.qwen2_moe import QWEN2_MOE
from jattn.models.families.qwen3 import QWEN3
from jattn.models.families.qwen3_moe import QWEN3_MOE
from pallas_kernels.checks import require, unsupported

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        PHI3,
        PHI3SMALL,
        BLOOM,
        MPT,
        GPT_OSS,
        LLAMA4,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
    )
}

# What a model of text and more may say for its text part.
_OF_THE_WHOLE = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)

__all__ = ["FAMILIES", "Family", "Keys", "family_of", "filled", "normalised", "text_part", "token_ids"]


def family_of(hf: Keys) -> Family:
    """The family of a config.json, by its model_type or, where it has none, its architecture.

    Raises:
        NotImplementedError: No family is it; the message lists those that are here.
    """
    architectures = list(hf.get("architectures") or [])
    by_name = {name: family for family in FAMILIES.values() for name in _architectures(family)}
    model_type = hf.get("model_type")
    family = FAMILIES.get(model_type) if model_type else by_name.get(next(iter(architectures), ""))
    supported = "Supported: " + ", ".join(family.architecture for family in FAMILIES.values())
    if family is None:
        raise unsupported(f"architecture {architectures or model_type}", "no decoder here has it", supported)
    if architectures and not set(_architectures(family)) & set(architectures):
        raise unsupported(f"architecture {architectures[0]}", f"not a decoder for {model_type}", supported)
    return family


def _architectures(family: Family) -> tuple[str, ...]:
    return family.architecture, *family.other_architectures


def text_part(hf: Keys) -> Keys:
    """A config.json of text alone: of a model of text and more, its text part.

    Raises:
        ValueError: `text_config` is no object.
    """
    for family in FAMILIES.values():
        wrapper = family.wrapper
        names = hf.get("model_type"), *(hf.get("architectures") or ())
        if wrapper is None or not {wrapper.model_type, wrapper.architecture} & {*names}:
            continue
        text = hf.get("text_config") or {}
        require(isinstance(text, Mapping), "text_config", "be an object", repr(text))
        outer = {key: hf[key] for key in _OF_THE_WHOLE if hf.get(key) is not None}
        told = {key: value for key, value in text.items() if value is not None or key not in outer}
        return {**outer, **told, "model_type": family.model_type, "architectures": [family.architecture]}
    return hf
