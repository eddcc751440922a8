"""What tells one family of decoders from another: data, and how a layer's specs follow from its keys."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jattn.models.loading.tensor_layouts import Stored
from jattn.models.specs import LayerSpec

type Keys = Mapping[str, Any]  # a config.json's, with every default filled in


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One family.

    Attributes:
        model_type: As config.json has it.
        architecture: Its class in transformers (Phi-3-small's: in its own repository).
        other_architectures: Other names of that class.
        nested: Keys with a dictionary, whose keys are read as `key.inner`.
        defaults: The keys that it reads besides those of all families, or with another default than theirs:
            what transformers takes where config.json is silent, or a function of the other keys.
        layer: A layer's specs, from the keys and the layer's number.
        tensors: Where a checkpoint has the parameters: by our module's name, layers' numbers as `*`.
        norm: Kind of every norm, a `NormSpec`'s.
        norm_placement: A `DecoderConfig`'s.
        model: What is scaled, normalised and hidden outside the layers, and what the keys say of fields that
            other families have fixed: fields of `DecoderConfig`.
        aliases: Its own names of keys -> the names that all families share.
        only: Key -> the values that are served, and why no others.
        harmless: Keys that change nothing here, beyond those that never do.
        other_tensors: Where other checkpoints have some of the parameters: what is found there counts.
        prefix: What the tensors' names begin with; a checkpoint of the body alone lacks it.
    """

    model_type: str
    architecture: str
    defaults: Keys
    layer: Callable[[Keys, int], LayerSpec]
    tensors: Mapping[str, Stored]
    norm: str = "rms"
    norm_placement: str = "before"
    model: Callable[[Keys], Mapping[str, Any]] = lambda keys: {}
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[tuple[Any, ...], str]] = dataclasses.field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    other_architectures: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    other_tensors: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
