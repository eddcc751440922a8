"""Serve several prompts with a small KV cache: batching, chunked prefill and preemption.

python -m examples.serve_a_batch [MODEL_FOLDER]
"""

import pathlib
import sys
from collections.abc import Sequence

import jattn.models
from jattn.serving import Engine, SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    args = sys.argv[1:] if argv is None else argv
    model = jattn.models.load(args[0] if args else pathlib.Path(__file__).parent / "tiny_model")
    engine = Engine(
        model,
        num_blocks=17,  # 16 usable blocks are too few for the four requests at once.
        max_num_seqs=4,
        max_num_batched_tokens=32,  # Longer prompts are prefilled in chunks.
    )
    prompts = [
        "def add(a, b):\n    return ",
        "import os\nimport ",
        "class Point:\n    def ",
        "x = [i for i in " * 6,
    ]
    greedy, random = SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, seed=0)
    results = engine.generate(prompts, [greedy, greedy, random, greedy], max_tokens=48)
    for prompt, result in zip(prompts, results, strict=True):
        print(f"--- {result.finish_reason} after {len(result.token_ids)} tokens")
        print(prompt + result.text)
    print(f"--- {engine.stats}")


if __name__ == "__main__":
    main()
