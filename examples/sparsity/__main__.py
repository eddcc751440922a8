"""Compare sparsity patterns on the tiny model and write a table and three plots.

python -m examples.sparsity --out DIR

Needs jattn[models,plot] and optax. The held-out text comes from the Python standard library.
"""

import argparse
import pathlib
import sysconfig

import numpy as np

from examples.python_sources import line_starts, read_sources
from examples.sparsity import plots
from examples.sparsity.measure import Result, measure
from examples.sparsity.patterns import PATTERNS
from jattn.models import load

MODEL = pathlib.Path(__file__).parents[1] / "tiny_model"


def format_table(results: dict[str, Result], timed_tokens: int) -> str:
    """Return a Markdown table of each pattern's density, attention mass, bits per byte and time per layer."""
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
    parser.add_argument("--model", default=str(MODEL), help="directory of a byte-level Llama model")
    parser.add_argument(
        "--data", default=sysconfig.get_path("stdlib"), help="directory of Python source files"
    )
    parser.add_argument("--out", required=True, help="output directory for the table and the plots")
    parser.add_argument("--windows", type=int, default=4, help="number of held-out windows [%(default)s]")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per window [%(default)s]")
    parser.add_argument(
        "--timed-tokens", type=int, default=1024, help="length of the timed prompt [%(default)s]"
    )
    parser.add_argument(
        "--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS, help="patterns to compare [all]"
    )
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
    table = format_table(results, options.timed_tokens)
    (out / "table.md").write_text(table + "\n")
    print(table)
    for path in plots.save_plots(results, options.tokens, options.timed_tokens, out):
        print(path)


if __name__ == "__main__":
    main()
