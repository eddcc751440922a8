"""How a checkpoint says that its tokens are to be picked: generation_config.json."""

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
    """What a checkpoint says of sampling. None = it does not say.

    Attributes:
        do_sample: Tokens are to be drawn, not the likeliest taken.
        temperature: As `SamplingParams` has it, and so the others.
        top_p: See there.
        top_k: See there.
        min_p: See there.
        repetition_penalty: See there.
    """

    do_sample: bool = False
    temperature: float | int | None = None
    top_p: float | int | None = None
    top_k: float | int | None = None
    min_p: float | int | None = None
    repetition_penalty: float | int | None = None

    @classmethod
    def read(cls, directory: pathlib.Path) -> "GenerationConfig":
        """Of a Hugging Face folder; one without the file says nothing.

        Raises:
            ValueError: The file is broken, or a value is of another kind; the message names it.
        """
        path = directory / FILE
        if not path.exists():
            return cls()
        content = read_json(path)
        names = [field.name for field in dataclasses.fields(cls)]
        told = {name: content[name] for name in names if content.get(name) is not None}
        for name, value in told.items():
            is_bool = isinstance(value, bool)
            is_right = is_bool if name == "do_sample" else isinstance(value, numbers.Real) and not is_bool
            kind = "true or false" if name == "do_sample" else "a number"
            require(is_right, f"{path}: {name}", f"be {kind}", repr(value))
        return cls(**told)

    def told(self) -> dict[str, Any]:
        """What it says, do_sample apart."""
        values = dataclasses.asdict(self)
        del values["do_sample"]
        return {name: value for name, value in values.items() if value is not None}

    def write(self, directory: pathlib.Path) -> None:
        """Puts the file into a folder, where there is something to say."""
        if self != GenerationConfig():
            content = {"do_sample": self.do_sample} | self.told()
            (directory / FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
