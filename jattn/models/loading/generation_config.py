"""generation_config.json: a checkpoint's default sampling parameters."""

import dataclasses
import json
import numbers
import pathlib
from typing import Any

from jattn.models.loading.files import read_json
from pallas_kernels.checks import require

FILE = "generation_config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """A checkpoint's default sampling parameters; None = the file does not set it.

    Attributes:
        do_sample: Whether tokens are sampled; False = greedy decoding.
        temperature: Sampling temperature; see `SamplingParams`, as for the following.
        top_p: Cumulative probability of the candidate tokens.
        top_k: Maximum number of candidate tokens.
        min_p: Minimum probability of a candidate, relative to the likeliest token.
        repetition_penalty: Penalty of tokens that already occur in prompt or output.
    """

    do_sample: bool = False
    temperature: float | int | None = None
    top_p: float | int | None = None
    top_k: float | int | None = None
    min_p: float | int | None = None
    repetition_penalty: float | int | None = None

    @classmethod
    def read(cls, directory: pathlib.Path) -> "GenerationConfig":
        """Read the file in a Hugging Face folder; without the file all fields are unset.

        Raises:
            ValueError: If the file is not valid JSON, or a value has the wrong type. The message names it.
        """
        path = directory / FILE
        if not path.exists():
            return cls()
        content = read_json(path)
        names = [field.name for field in dataclasses.fields(cls)]
        values = {name: content[name] for name in names if content.get(name) is not None}
        for name, value in values.items():
            is_bool = isinstance(value, bool)
            is_valid = is_bool if name == "do_sample" else isinstance(value, numbers.Real) and not is_bool
            expected = "true or false" if name == "do_sample" else "a number"
            require(is_valid, f"{path}: {name}", f"be {expected}", repr(value))
        return cls(**values)

    def sampling_defaults(self) -> dict[str, Any]:
        """Return the values that are set, without do_sample."""
        values = dataclasses.asdict(self)
        del values["do_sample"]
        return {name: value for name, value in values.items() if value is not None}

    def write(self, directory: pathlib.Path) -> None:
        """Write the file into a folder if any value is set."""
        if self != GenerationConfig():
            content = {"do_sample": self.do_sample} | self.sampling_defaults()
            (directory / FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
