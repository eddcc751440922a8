"""The families of decoders: a file and a line each."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.gemma2 import GEMMA2
from jattn.models.families.keys import filled, normalised, token_ids
from jattn.models.families.llama import LLAMA
from jattn.models.families.mistral import MISTRAL
from jattn.models.families.qwen2 import QWEN2
from jattn.models.families.qwen3 import QWEN3
from pallas_kernels.checks import unsupported

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA2,
    )
}

__all__ = ["FAMILIES", "Family", "Keys", "family_of", "filled", "normalised", "token_ids"]


def family_of(hf: Keys) -> Family:
    """The family of a config.json, by its model_type or, where it has none, its architecture.

    Raises:
        NotImplementedError: No family is it; the message lists those that are here.
    """
    architectures = list(hf.get("architectures") or [])
    by_architecture = {family.architecture: family for family in FAMILIES.values()}
    by_name = by_architecture.get(next(iter(architectures), ""))
    model_type = hf.get("model_type")
    family = FAMILIES.get(model_type) if model_type else by_name
    supported = "Supported: " + ", ".join(by_architecture)
    if family is None:
        raise unsupported(f"architecture {architectures or model_type}", "no decoder here has it", supported)
    if architectures and family.architecture not in architectures:
        raise unsupported(f"architecture {architectures[0]}", f"not a decoder for {model_type}", supported)
    return family
