"""Compares sparsity patterns on the tiny model: a table and three pictures.

python -m examples.sparsity --out DIR

Needs jattn[models,plot] and optax. Held-out text: the Python library's (examples.python_sources).
"""

import argparse
import pathlib
import sysconfig

import numpy as np

from examples.python_sources import line_starts, read_sources
from examples.sparsity import pictures
from examples.sparsity.measure import Result, measure
from examples.sparsity.patterns import PATTERNS
from jattn.models import load

MODEL = pathlib.Path(__file__).parents[1] / "tiny_model"


def table(results: dict[str, Result], timed_tokens: int) -> str:
    """Markdown: one row a pattern, the time of a layer, and the mass that each layer keeps."""
    num_layers = next(iter(results.values())).mass.shape[0]
    layers = "".join(f" layer {i} |" for i in range(num_layers))
    times = f"{timed_tokens} tokens: density | ms | by"
    lines = [
        f"| pattern | density | mass kept | bits per byte | {times} |{layers}",
        "|---" * (7 + num_layers) + "|",
    ]
    for name, result in results.items():
        figures = f"{result.density.mean():.2f} | {result.mass.mean():.3f} | {result.bits:.3f}"
        by_layer = "".join(f" {mass:.2f} |" for mass in result.mass.mean(axis=1))
        speed = result.speed
        times = f"{speed.density:.3f} | {speed.milliseconds:.3f} | {speed.implementation}"
        lines.append(f"| {name} | {figures} | {times} |{by_layer}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.sparsity", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(MODEL), help="a folder of a Llama that speaks in bytes")
    parser.add_argument("--data", default=sysconfig.get_path("stdlib"), help="a folder of Python sources")
    parser.add_argument("--out", required=True, help="folder of the table and the pictures")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--timed-tokens", type=int, default=1024, help="of the prompt that is timed")
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    options = parser.parse_args(arguments)
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)

    model = load(options.model)
    _, text = read_sources(pathlib.Path(options.data))
    starts = np.random.default_rng(0).choice(line_starts(text), options.windows, replace=False)
    windows = text[starts[:, None] + np.arange(options.tokens + 1)]
    results = {}
    for name in options.patterns:
        results[name] = measure(model, windows, PATTERNS[name], options.timed_tokens)
        print(f"{name}: {results[name].bits:.3f} bits per byte", flush=True)
    written = table(results, options.timed_tokens)
    (out / "table.md").write_text(written + "\n")
    print(written)
    for path in pictures.draw(results, options.tokens, options.timed_tokens, out):
        print(path)


if __name__ == "__main__":
    main()
