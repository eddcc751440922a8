"""The registry of supported model families.

A family is data: see `Family`. Families are grouped in modules by lineage. Register one of your own with
`FAMILIES["my_model_type"] = Family(...)`, in a module that an entry point of the group `jattn.plugins` names.
"""

import functools
import importlib.metadata
import re
from collections.abc import Sequence

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
    class_defaults,
    config_class,
    config_types,
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

_LATENT = "multi-head latent attention is not supported"
_STATES = "layers with recurrent state are not supported"
_SHARED = "layers with shared keys and values are not supported"
_CROSS = "cross attention is not supported"
_BOTH = "encoder models with bidirectional attention are not supported"
# Why a model is not supported, by a field of its configuration class or, without such a field, by model_type.
_REASONS = {
    _STATES: "linear_conv_kernel_dim mamba_d_state state_size ssm_state_size conv_L_cache lru_width"
    " attention_hidden_size",
    _LATENT: "kv_lora_rank",
    _SHARED: "num_kv_shared_layers",
    _CROSS: "cross_attention_layers decoder_layers num_decoder_layers",
    _BOTH: "type_vocab_size",
}
_REASONS_BY_TYPE = {
    _LATENT: "deepseek_v4 kimi_k2",
    _STATES: "bailing_hybrid granite4_vision minimax xlstm",
    _CROSS: "encoder_decoder moshi nllb_moe t5gemma vision_encoder_decoder",
    _BOTH: "deberta_v2 distilbert eurobert modernbert xlm_roberta",
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
        reason = _unsupported_reason([*([model_type] if model_type else ()), *architectures])
        raise unsupported(f"architecture {architectures or model_type}", reason, supported)
    class_names = _classes(family.architecture, *family.other_architectures)
    if architectures and not set(class_names) & set(architectures):
        raise unsupported(
            f"architecture {architectures[0]}",
            f"not a causal language model of model_type {model_type!r}",
            "Supported: " + ", ".join(class_names),
        )
    return family


def _unsupported_reason(names: Sequence[str]) -> str:
    """Return why a model is not supported, by its model_type and its architectures."""

    def plain(name: str) -> str:
        return re.sub(r"(For[A-Z]\w+|Model|_text)$", "", name).replace("_", "").lower()

    wanted = set(map(plain, names))
    for reason, types in _REASONS_BY_TYPE.items():
        if wanted & {plain(name) for name in types.split()}:
            return reason
    for model_type in filter(lambda name: plain(name) in wanted, config_types()):
        text_type = getattr(config_class(model_type).sub_configs.get("text_config"), "model_type", "")
        fields = {*class_defaults(model_type), *(class_defaults(text_type) if text_type else ())}
        for reason, names_of_fields in _REASONS.items():
            if fields & {*names_of_fields.split()}:
                return reason
    return "the model is not supported"


def served_keys() -> set[str]:
    """Return the keys of config.json that any family reads."""
    families = FAMILIES.values()
    return {key for f in families for key in (*f.read_keys, *f.defaults, *f.aliases, *f.supported_values)}


def _classes(*names: str) -> tuple[str, ...]:
    """Return class names with and without the output projection, such as LlamaForCausalLM and LlamaModel."""
    return *names, *(re.sub("ForCausalLM$|LMHeadModel$", "Model", name) for name in names)
