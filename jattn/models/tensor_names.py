"""A checkpoint's tensors by the names that its family has for them, whatever they are called there."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jattn.models.config import DecoderConfig
from jattn.models.families import Family
from jattn.models.families.wrappers import text_tensors
from jattn.models.hf_tensors import Stored
from pallas_kernels.checks import require

_NUM_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


def by_family_s_names(
    tensors: Mapping[str, Any], config: DecoderConfig, *, has_more_than_text: bool
) -> dict[str, Any]:
    """A checkpoint's tensors by the names that its family has for them.

    Layers behind the last, which draft tokens, are passed over. A checkpoint that has the head alone where
    that is the embedding has the embedding.

    Args:
        tensors: By the names that they have there.
        config: Of the decoder.
        has_more_than_text: Those that have no part in text are passed over.

    Raises:
        ValueError: Two tensors have one name.
    """
    family = config.family
    named = text_tensors(tensors) if has_more_than_text else dict(tensors)
    named = _with_the_family_s_prefix(named, family)
    drafts = _names_of_drafts(config)
    named = {name: tensor for name, tensor in named.items() if not name.startswith(drafts)}
    head, embedding = (f"{family.tensors[part].names[0]}." for part in ("lm_head", "embed_tokens"))
    if config.tie_word_embeddings and not any(name.startswith(embedding) for name in named):
        of_head = [name for name in named if name.startswith(head)]
        named |= {embedding + name.removeprefix(head): named.pop(name) for name in of_head}
    return named


def tensors_in(family: Family, names: Iterable[str]) -> dict[str, Stored]:
    """Where a checkpoint has a family's parameters.

    Args:
        family: The family.
        names: Of the checkpoint's tensors.
    """
    modules = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name.removesuffix(".weight")) for name in names}
    others = family.other_tensors.items()
    return {**family.tensors, **{ours: stored for ours, stored in others if modules & {*stored.names}}}


def _with_the_family_s_prefix(tensors: dict[str, Any], family: Family) -> dict[str, Any]:
    """With the prefix that the body has in the whole, where it has none or others in a checkpoint.

    The body alone has none; what trainers, adapters and models of more than text wrap around it has another,
    or one before it. Where the body begins is told by a tensor of the first layer.
    """
    (head,), (inner,) = (family.tensors[part].names for part in ("lm_head", "layers.*.self_attn.o_proj"))
    inner = inner.removeprefix(family.prefix).replace("*", "0")
    place = re.compile(rf"(|.+\.){re.escape(inner)}\..+")
    found = sorted({match[1] for match in map(place.fullmatch, tensors) if match}, key=len)
    if not found or family.prefix in found:
        return tensors
    lacks_prefix = not found[0].endswith(f".{family.prefix}")
    outer = found[0] if lacks_prefix else found[0].removesuffix(family.prefix)
    named: dict[str, Any] = {}
    for name, tensor in tensors.items():
        new = name.removeprefix(outer)
        if lacks_prefix and name.startswith(outer) and not new.startswith(f"{head}."):
            new = family.prefix + new
        require(new not in named, "the checkpoint", f"have one tensor {new}", f"another named {name}")
        named[new] = tensor
    return named


def _names_of_drafts(config: DecoderConfig) -> tuple[str, ...]:
    """What the names of tensors begin with that only draft the tokens behind the next."""
    hf, prefix = json.loads(config.source), config.family.prefix
    count = max(hf.get(key) or 0 for key in _NUM_DRAFT_LAYERS)
    layers = range(config.num_hidden_layers, config.num_hidden_layers + count)
    others = (f"{prefix}mtp_", "mtp.") if count else ()
    return (*(f"{prefix}layers.{layer}." for layer in layers), *others)
