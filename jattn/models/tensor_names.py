"""A checkpoint's tensors by the names that its family has for them, whatever they are called there."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families import Family
from jattn.models.families.family import Wrapper


class Renamed:
    """A safetensors file that has a tensor under another name."""

    def __init__(self, file: Any, name: str) -> None:
        """Of an open file; `name` is the tensor's there."""
        self._file, self._name = file, name

    def get_slice(self, name: str) -> Any:
        """The tensor's header, whatever it is called here."""
        return self._file.get_slice(self._name)

    def get_tensor(self, name: str) -> Any:
        """The tensor, whatever it is called here."""
        return self._file.get_tensor(self._name)


def by_family_s_names(files: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """A checkpoint's files by the names that its family has for tensors.

    Of a model of text and more those that have no part in text are passed over. A checkpoint of the body
    alone lacks the prefix that the body has in the whole: it is put before.

    Args:
        files: Tensor's name -> file, as `checkpoint.open_tensors` returns them.
        family: The family.
    """
    named = _of_text(files, family.wrapper) if family.wrapper else dict(files)
    if any(name.startswith(family.prefix) for name in named):
        return named
    is_outside = lambda name: name.startswith("lm_head.")
    return {
        name if is_outside(name) else family.prefix + name: file if is_outside(name) else Renamed(file, name)
        for name, file in named.items()
    }


def _of_text(files: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, file in files.items():
        if name.startswith(wrapper.passed_over):
            continue
        old = next((old for old in wrapper.renamed if name.startswith(old)), None)
        if old is None:
            named[name] = file
        else:
            named[wrapper.renamed[old] + name.removeprefix(old)] = Renamed(file, name)
    return named
