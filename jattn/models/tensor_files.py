"""Which files of a Hugging Face folder hold its tensors, and what to do where there are none."""

import pathlib
import re
from collections.abc import Mapping, Sequence

from jattn.models.json_files import existing, read_json
from pallas_kernels.checks import require

SCALES_FILE = "kv_scales.safetensors"  # a cache's static scales, where the model's own files have none
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
# Beginnings of files that may stand beside a model's: not its tensors, or those under other names.
_BESIDE = ("consolidated", "adapter_model", "kv_scales")
# What a folder may have instead, and the way out.
_INSTEAD = {
    "consolidated*.safetensors": "has Mistral's own names, which are not read here: take the *.safetensors "
    "of the same checkpoint that transformers reads",
    "adapter_model.*": "is an adapter, not a model: merge it into its model and save that",
    "pytorch_model*.bin": "is pickled, which is not read here: AutoModelForCausalLM.from_pretrained(folder)"
    ".save_pretrained(other_folder) of transformers makes safetensors of it",
    "*.pth": "is pickled, which is not read here: take the checkpoint in the form of Hugging Face",
    "*.gguf": "is llama.cpp's: take the checkpoint that it was made of",
    "*/*.safetensors": "is in a folder below: load that one if it has a config.json of its own",
}


def tensor_files(directory: pathlib.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    """The files, and in which of them a tensor is said to be, by names; nothing is said where no index is.

    model.safetensors; or those that the index names; or the shards that are numbered; or all.

    Raises:
        FileNotFoundError: There is none, or one that the index or the shards' numbers tell of is missing.
        ValueError: The index is broken.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return [single], {}
    if index.exists():
        return _indexed(index)
    found = [path for path in directory.glob("*.safetensors") if not path.name.startswith(_BESIDE)]
    shards = [path for path in found if path.name.startswith("model-") and _SHARD.fullmatch(path.name)]
    found = sorted(shards or found)
    _require_all_shards(found)
    if not found:
        raise FileNotFoundError(f"{single} does not exist{_instead(directory)}.")
    return found, {}


def _indexed(index: pathlib.Path) -> tuple[list[pathlib.Path], Mapping[str, str]]:
    places = read_json(index).get("weight_map") or {}
    are_names = isinstance(places, dict) and all(isinstance(name, str) for name in places.values())
    require(are_names and len(places) > 0, f"{index}'s weight_map", "map tensors to files", repr(places)[:60])
    names = sorted(set(places.values()))
    others = [name for name in names if not name.endswith(".safetensors")]
    require(not others, f"{index}'s weight_map", "map tensors to safetensors files", ", ".join(others[:3]))
    for name in names:
        existing(index.parent / name, f" ({_INDEX} names it)")
    return [index.parent / name for name in names], places


def _require_all_shards(paths: Sequence[pathlib.Path]) -> None:
    """Of shards that say how many they are, none may be missing."""
    for path in paths:
        shard = _SHARD.fullmatch(path.name)
        if shard is None:
            continue
        for number in range(1, int(shard[3]) + 1):
            name = f"{shard[1]}-{number:0{len(shard[2])}}-of-{shard[3]}.safetensors"
            existing(path.with_name(name), f" ({path.name} is one of {int(shard[3])})")


def _instead(directory: pathlib.Path) -> str:
    for pattern, what in _INSTEAD.items():
        for path in sorted(directory.glob(pattern))[:1]:
            return f"; {path.relative_to(directory)} {what}"
    return ""
