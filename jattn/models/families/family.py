"""The record that describes a model family."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.specs import LayerSpec

type Keys = Mapping[str, Any]  # the keys of a config.json, usually with all defaults


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A model family: how its config.json maps to layers, and its parameters to a checkpoint's tensors.

    Attributes:
        model_type: Value of config.json's model_type.
        architecture: Class in transformers (for Phi-3-small: in its own repository).
        keys: Keys that the family reads in addition to the common ones, separated by spaces. Their defaults
            are those of the configuration class in transformers.
        defaults: Other defaults: for keys that the class does not have, or computes. A value, or a function
            of the other keys that returns it.
        build_layer: Function that returns a layer's specification from the keys and the layer's index.
        tensors: Mapping of our modules, with layers' indices as `*`, to the checkpoint's tensors.
        norm: Kind of every norm, see `NormSpec`.
        norm_placement: Placement of a layer's norms, see `DecoderConfig`.
        config_fields: Function that returns fields of `DecoderConfig` from the keys, such as scales.
        aliases: The family's names of keys, mapped to the names that all families share, in addition to the
            class's attribute_map.
        supported_values: For keys with restrictions: the supported values, and why others are not.
        ignored_keys: Keys that do not change the result, in addition to those ignored for all families;
            separated by spaces.
        other_architectures: Other names of the architecture.
        nested_keys: Keys that hold a dictionary, whose keys are read as `key.inner`.
        alternative_tensors: Other mappings of some parameters, used if the checkpoint has these tensors.
        prefix: Prefix of the tensors' names, which checkpoints of the base model alone lack.
        config_class: model_type of the configuration class in transformers; None = the family's.
    """

    model_type: str
    architecture: str
    build_layer: Callable[[Keys, int], LayerSpec]
    tensors: Mapping[str, HFTensors]
    keys: str = ""
    defaults: Keys = dataclasses.field(default_factory=dict)
    norm: str = "rms"
    norm_placement: str = "before"
    config_fields: Callable[[Keys], Mapping[str, Any]] = lambda keys: {}
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    supported_values: Mapping[str, tuple[tuple[Any, ...], str]] = dataclasses.field(default_factory=dict)
    ignored_keys: str = ""
    other_architectures: tuple[str, ...] = ()
    nested_keys: tuple[str, ...] = ()
    alternative_tensors: Mapping[str, HFTensors] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    config_class: str | None = None

    @property
    def read_keys(self) -> list[str]:
        """The names in `keys`."""
        return self.keys.split()
