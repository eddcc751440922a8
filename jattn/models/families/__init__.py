"""The families of decoders: a file and a line each."""

from jattn.models.families.arcee import ARCEE
from jattn.models.families.bloom import BLOOM
from jattn.models.families.cohere import COHERE
from jattn.models.families.cohere2 import COHERE2
from jattn.models.families.cwm import CWM
from jattn.models.families.ernie4_5 import ERNIE4_5
from jattn.models.families.exaone4 import EXAONE4
from jattn.models.families.falcon import FALCON
from jattn.models.families.family import Family, Keys
from jattn.models.families.gemma import GEMMA
from jattn.models.families.gemma2 import GEMMA2
from jattn.models.families.gemma3 import GEMMA3
from jattn.models.families.glm4 import GLM, GLM4
from jattn.models.families.gpt2 import GPT2
from jattn.models.families.gpt_bigcode import GPT_BIGCODE
from jattn.models.families.gpt_neo import GPT_NEO
from jattn.models.families.gpt_neox import GPT_NEOX
from jattn.models.families.gpt_oss import GPT_OSS
from jattn.models.families.gptj import GPTJ
from jattn.models.families.granite import GRANITE
from jattn.models.families.granitemoe import GRANITEMOE, GRANITEMOESHARED
from jattn.models.families.granitemoehybrid import GRANITEMOEHYBRID
from jattn.models.families.keys import filled, normalised, token_ids
from jattn.models.families.llama import LLAMA
from jattn.models.families.llama4 import LLAMA4
from jattn.models.families.ministral import MINISTRAL, MINISTRAL3
from jattn.models.families.mistral import MISTRAL
from jattn.models.families.mixtral import MIXTRAL
from jattn.models.families.mpt import MPT
from jattn.models.families.nemotron import NEMOTRON
from jattn.models.families.olmo import OLMO
from jattn.models.families.olmo2 import OLMO2
from jattn.models.families.olmo3 import OLMO3
from jattn.models.families.olmoe import OLMOE
from jattn.models.families.opt import OPT
from jattn.models.families.persimmon import PERSIMMON
from jattn.models.families.phi import PHI
from jattn.models.families.phi3 import PHI3
from jattn.models.families.phi3small import PHI3SMALL
from jattn.models.families.qwen2 import QWEN2
from jattn.models.families.qwen2_moe import QWEN2_MOE
from jattn.models.families.qwen3 import QWEN3
from jattn.models.families.qwen3_moe import QWEN3_MOE
from jattn.models.families.seed_oss import SEED_OSS
from jattn.models.families.smollm3 import SMOLLM3
from jattn.models.families.stablelm import STABLELM
from jattn.models.families.starcoder2 import STARCODER2
from jattn.models.families.vaultgemma import VAULTGEMMA
from jattn.models.families.wrappers import text_part
from pallas_kernels.checks import unsupported

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
        COHERE,
        COHERE2,
        EXAONE4,
        FALCON,
        GLM,
        GLM4,
        GPT2,
        GPT_NEOX,
        GRANITE,
        GRANITEMOE,
        GRANITEMOESHARED,
        MINISTRAL,
        MINISTRAL3,
        OLMO,
        OLMO2,
        OLMO3,
        OLMOE,
        OPT,
        PHI,
        SMOLLM3,
        STABLELM,
        STARCODER2,
        ARCEE,
        CWM,
        ERNIE4_5,
        GPT_BIGCODE,
        GPT_NEO,
        GPTJ,
        GRANITEMOEHYBRID,
        NEMOTRON,
        PERSIMMON,
        SEED_OSS,
        VAULTGEMMA,
    )
}

_LATENT = "keys and values are latent, and no cache here holds those"
_STATES = "layers have states of their own"
# Decoders of another kind than this one, and why.
ELSEWHERE = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3"), _LATENT),
    **dict.fromkeys(("qwen3_next", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba"), _STATES),
    **dict.fromkeys(("bamba", "recurrent_gemma", "lfm2", "nemotron_h", "zamba2", "rwkv"), _STATES),
}

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
        reason = ELSEWHERE.get(str(model_type), "no decoder here has it")
        raise unsupported(f"architecture {architectures or model_type}", reason, supported)
    if architectures and not set(_architectures(family)) & set(architectures):
        raise unsupported(f"architecture {architectures[0]}", f"not a decoder for {model_type}", supported)
    return family


def _architectures(family: Family) -> tuple[str, ...]:
    return family.architecture, *family.other_architectures
