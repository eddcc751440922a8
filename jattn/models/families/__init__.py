"""The registry of supported model families.

A family is data: see `Family`. Families are grouped in modules by lineage. Register one of your own with
`FAMILIES["my_model_type"] = Family(...)`, in a module that an entry point of the group `jattn.plugins` names.
"""

import functools
import importlib.metadata
import re

from jattn.models.families import (
    bloom_mpt_falcon,
    cohere,
    gemma,
    glm,
    gpt,
    granite,
    hunyuan,
    llama,
    llama_variants,
    mistral,
    olmo,
    phi,
    qwen,
)
from jattn.models.families.config_keys import (
    fill_defaults,
    normalize_config,
    token_ids,
)
from jattn.models.families.family import Family, Keys
from jattn.models.families.multimodal import extract_text_config
from pallas_kernels.checks import unsupported

_MODULES = (
    *(llama, llama_variants, mistral, qwen, gemma, phi, gpt, bloom_mpt_falcon, glm),
    *(hunyuan, granite, olmo, cohere),
)
FAMILIES = {
    family.model_type: family
    for module in _MODULES
    for family in vars(module).values()
    if isinstance(family, Family)
}
# What models of known families that are not supported would need, by model_type.
_MISSING_LAYERS = {
    "gemma3n": "it has embeddings per layer and alternating updates (AltUp)",
    "gemma4": "it has embeddings per layer, and layers that use the keys of others",
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash"),
        "it has latent attention (MLA)",
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "minimax", "olmo_hybrid"),
        "it has linear attention",
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h", "jamba", "bamba", "zamba2"),
        "it has recurrent layers (Mamba)",
    ),
}

__all__ = [
    "FAMILIES",
    "Family",
    "Keys",
    "extract_text_config",
    "fill_defaults",
    "find_family",
    "load_plugins",
    "normalize_config",
    "served_keys",
    "token_ids",
]


@functools.cache
def load_plugins() -> None:
    """Import the modules that the installed packages name as entry points of the group `jattn.plugins`, once.

    Raises:
        ImportError: If one cannot be imported. The message names it.
    """
    for plugin in importlib.metadata.entry_points(group="jattn.plugins"):
        try:
            plugin.load()
        except Exception as error:
            raise ImportError(f"The plugin {plugin.name!r} ({plugin.value}) failed: {error}") from error


def find_family(hf: Keys) -> Family:
    """Return the family of a config.json by its model_type or, if it has none, its architecture.

    Raises:
        NotImplementedError: If the family is not supported. The message lists the supported ones.
    """
    load_plugins()
    architectures = list(hf.get("architectures") or [])
    families = FAMILIES.values()  # an architecture of several families belongs to the one named after it
    by_name = {name: family for family in families for name in _classes(*family.other_architectures)}
    by_name |= {name: family for family in families for name in _classes(family.architecture)}
    model_type = hf.get("model_type")
    family = FAMILIES.get(model_type) if model_type else by_name.get(next(iter(architectures), ""))
    supported = "Supported: " + ", ".join(family.architecture for family in FAMILIES.values())
    if family is None:
        fix = f"{supported}. Register others with a module that --plugin or an entry point names"
        name = f"model_type {model_type!r}" if model_type else f"architecture {', '.join(architectures)}"
        raise unsupported(name, _reason_without_family(model_type, architectures), fix)
    class_names = _classes(family.architecture, *family.other_architectures)
    if architectures and not set(class_names) & set(architectures):
        raise unsupported(
            f"architecture {architectures[0]}",
            f"not a causal language model of model_type {model_type!r}",
            "Supported: " + ", ".join(class_names),
        )
    return family


def _reason_without_family(model_type: str | None, architectures: list[str]) -> str:
    """Return why no family supports a model, given what its config.json says."""
    classes = [name.replace("_", "").lower() for name in architectures]
    for name, layers in _MISSING_LAYERS.items():
        prefix = f"{name.replace('_', '')}for"
        if model_type in (name, f"{name}_text") or any(cls.startswith(prefix) for cls in classes):
            return f"{layers}, which jattn does not support"
    return "no model family is registered for it"


def served_keys() -> set[str]:
    """Return the keys of config.json that any family reads."""
    families = FAMILIES.values()
    return {key for f in families for key in (*f.read_keys, *f.defaults, *f.aliases, *f.supported_values)}


def _classes(*names: str) -> tuple[str, ...]:
    """Return class names with and without the output projection, such as LlamaForCausalLM and LlamaModel."""
    return *names, *(re.sub("ForCausalLM$|LMHeadModel$", "Model", name) for name in names)
