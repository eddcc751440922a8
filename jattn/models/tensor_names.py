"""A checkpoint's tensors by the names that its family has for them, whatever they are called there."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families import Family
from jattn.models.families.family import Wrapper


def by_family_s_names(tensors: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """A checkpoint's tensors by the names that its family has for them.

    Of a model of text and more those that have no part in text are passed over. A checkpoint of the body
    alone lacks the prefix that the body has in the whole: it is put before.

    Args:
        tensors: By the names that they have there.
        family: The family.
    """
    named = _of_text(tensors, family.wrapper) if family.wrapper else dict(tensors)
    if any(name.startswith(family.prefix) for name in named):
        return named
    prefix = lambda name: "" if name.startswith("lm_head.") else family.prefix
    return {prefix(name) + name: tensor for name, tensor in named.items()}


def _of_text(tensors: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith(wrapper.passed_over):
            continue
        old = next((old for old in wrapper.renamed if name.startswith(old)), None)
        named[name if old is None else wrapper.renamed[old] + name.removeprefix(old)] = tensor
    return named
