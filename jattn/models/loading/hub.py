"""Checkpoints by their name on the Hugging Face Hub."""

import os
import pathlib

from jattn.models.loading.files import optional_module

_FILES, _WEIGHTS = ("*.json", "*.jinja"), "*.safetensors"
_OTHER_FORMATS = ("*/*.safetensors", "consolidated*")  # the same weights in other formats


def resolve_checkpoint(
    name: str | os.PathLike[str], revision: str | None = None, *, has_weights: bool = True
) -> pathlib.Path:
    """Return the folder of a checkpoint, after downloading a name on the Hub that is not in the Hub's cache.

    huggingface_hub determines the cache, the offline mode and the access token, also by its environment
    variables, such as HF_HOME, HF_HUB_OFFLINE and HF_TOKEN.

    Args:
        name: A folder, or the name of a model on the Hub, such as "org/name". A folder takes precedence.
        revision: Branch, tag or commit on the Hub; None = the default branch.
        has_weights: Whether to download the weights, too.

    Raises:
        FileNotFoundError: If it is neither a folder nor a model on the Hub that can be downloaded.
        ImportError: If huggingface_hub is not installed.
    """
    path = pathlib.Path(name)
    if path.exists():
        return path
    if path.is_absolute() or len(path.parts) != 2 or ".." in path.parts:
        raise FileNotFoundError(f"{path} is not a folder, nor a name on the Hub such as org/name.")
    hub = optional_module("huggingface_hub")
    try:
        return pathlib.Path(
            hub.snapshot_download(
                path.as_posix(),
                revision=revision,
                allow_patterns=[*_FILES, *([_WEIGHTS] if has_weights else [])],
                ignore_patterns=list(_OTHER_FORMATS),
            )
        )
    except Exception as error:  # huggingface_hub and its HTTP client have many types of errors
        at_revision = "" if revision is None else f" at revision {revision}"
        raise FileNotFoundError(
            f"{path} is not a folder, and the Hub has no such model{at_revision} or it cannot be downloaded: "
            f"{' '.join(str(error).split())}"
        ) from error
