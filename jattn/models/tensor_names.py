"""A checkpoint's tensors by the names that its family has for them, whatever they are called there."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jattn.models.families import Family
from jattn.models.families.wrappers import text_tensors
from jattn.models.hf_tensors import Stored


def by_family_s_names(
    tensors: Mapping[str, Any], family: Family, *, has_more_than_text: bool
) -> dict[str, Any]:
    """A checkpoint's tensors by the names that its family has for them.

    A checkpoint of the body alone lacks the prefix that the body has in the whole: it is put before.

    Args:
        tensors: By the names that they have there.
        family: The family.
        has_more_than_text: Those that have no part in text are passed over.
    """
    named = text_tensors(tensors) if has_more_than_text else dict(tensors)
    if any(name.startswith(family.prefix) for name in named):
        return named
    (head,) = family.tensors["lm_head"].names
    prefix = lambda name: "" if name.startswith(f"{head}.") else family.prefix
    return {prefix(name) + name: tensor for name, tensor in named.items()}


def tensors_in(family: Family, names: Iterable[str]) -> dict[str, Stored]:
    """Where a checkpoint has a family's parameters.

    Args:
        family: The family.
        names: Of the checkpoint's tensors.
    """
    modules = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name.removesuffix(".weight")) for name in names}
    others = family.other_tensors.items()
    return {**family.tensors, **{ours: stored for ours, stored in others if modules & {*stored.names}}}
