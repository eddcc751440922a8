"""Options that several commands share."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jattn.cache.spec import QUANTIZATION_ALIASES, QUANTIZATIONS
from jattn.implementations.selection import IMPLEMENTATIONS
from jattn.models.collectives import use_peer_memory, why_no_peer_memory
from jattn.models.kv_scales import CalibrationWarning
from jattn.parallel import make_mesh
from jattn.serving.engine.engine import Engine
from jattn.serving.engine.speculative import NGRAM
from pallas_kernels.checks import require, require_positive

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
DTYPES = ("bfloat16", "float16", "float32")
ENGINE_OPTIONS = (  # of Engine's keywords those with an option of the same name
    *("implementation", "quantization", "skip_layers", "max_num_seqs", "max_num_batched_tokens"),
    *("block_size", "num_blocks", "max_model_len", "enable_prefix_caching", "cache_dir"),
    *("speculative", "num_speculative_tokens", "cascade_attention", "batch_invariant"),
)


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without all the options there are."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Those that say how the model runs."""
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and computation [the checkpoint's]")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of the attention [the best]")
    formats = [*filter(None, QUANTIZATIONS), *QUANTIZATION_ALIASES]
    parser.add_argument("--quantization", choices=formats, help="of the cache [none]")
    parser.add_argument(
        "--skip-layers", type=_layers, action="extend", default=[], metavar="N,N", help="not quantised [none]"
    )
    own = "[as the device likes]"
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help=f"requests of a step {own}")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help=f"tokens of a step {own}")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a block [16]")
    parser.add_argument("--num-blocks", type=int, metavar="N", help="of each layer's cache [what fits]")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="the longest context [the model's]")
    parser.add_argument(
        "--speculative", metavar="WHO", help='who drafts: "ngram", or the DIR of a small model'
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=4, metavar="N", help="drafts of a request in a step [4]"
    )
    parser.add_argument(
        "--cascade-attention",
        action=argparse.BooleanOptionalAction,
        help="what all decoding requests begin with is read once [where it pays]",
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="the same bits whatever else runs, at a price"
    )
    _add_device_options(parser)
    parser.add_argument("--cache-dir", metavar="DIR", help="where executables are kept for the next start")
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prompts that begin alike are computed once",
    )


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    """Those of several devices, as vLLM has them."""
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="devices to spread the model over [1]",
    )
    parser.add_argument(
        "--decode-context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="of these, how many share the keys of each request [1]",
    )
    parser.add_argument(
        "--cp-kv-cache-interleave-size",
        type=int,
        default=1,
        metavar="N",
        help="neighbouring tokens whose keys stay on one of them [1]",
    )
    parser.add_argument(
        "--disable-custom-all-reduce",
        action="store_true",
        help="sums over devices are NCCL's in steps of few tokens, too",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Those that say how tokens are picked."""
    own = "[the checkpoint's, else"
    parser.add_argument("--temperature", type=float, metavar="T", help=f"0 = greedy {own} 0]")
    parser.add_argument("--top-k", type=int, metavar="K", help=f"only the K likeliest tokens {own} all]")
    parser.add_argument("--top-p", type=float, metavar="P", help=f"only the likeliest P {own} 1]")
    parser.add_argument("--min-p", type=float, metavar="P", help=f"as likely as P x best {own} 0]")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same text")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="the text ends before it; may be repeated"
    )


def require_silence(args: argparse.Namespace, adds: Sequence[Callable[..., None]], rule: str) -> None:
    """Refuses options that nothing would come of.

    Args:
        args: Of the command.
        adds: What gave its parser these options.
        rule: What is said of one that is another than where nobody says it.

    Raises:
        ValueError: One is; the message names it.
    """
    parser: argparse.ArgumentParser = OneLineParser()
    for add in adds:
        add(parser)
    for name, value in vars(parser.parse_args([])).items():
        require(getattr(args, name) == value, name, rule, getattr(args, name))


def requested_implementations(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the options name."""
    return {name: value for name in SAMPLING_OPTIONS if (value := getattr(args, name)) is not None}


def make_engine(args: argparse.Namespace, load: Callable[..., Any]) -> Any:
    """The Engine that the options ask for; what its caches lack is told on stderr."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CalibrationWarning)
        how = {"dtype": args.dtype, **_mesh(args)}
        model = load(args.model, **how)
        # Each engine of such a model must be the only one that runs on its devices, as it is here.
        wants_own = not (args.disable_custom_all_reduce or args.batch_invariant)
        if wants_own and why_no_peer_memory(model) is None:
            use_peer_memory(model)
        asked = {name: getattr(args, name) for name in ENGINE_OPTIONS}
        if args.speculative not in (None, NGRAM) and os.path.isdir(args.speculative):
            asked["speculative"] = load(args.speculative, **how)
        engine = Engine(model, **asked | {"skip_layers": tuple(args.skip_layers)})
    for warning in told:
        print(f"jattn: {warning.message}", file=sys.stderr)
    return engine


def _mesh(args: argparse.Namespace) -> dict[str, Any]:
    """What `load` is told of several devices, which vLLM counts all as tensor parallel."""
    size, cp = args.tensor_parallel_size, args.decode_context_parallel_size
    require_positive(decode_context_parallel_size=cp)
    rule = f"be a multiple of decode_context_parallel_size ({cp})"
    require(size % cp == 0, "tensor_parallel_size", rule, size)
    mesh = None if size == 1 else make_mesh(tp=size // cp, cp=cp)
    return {"mesh": mesh, "cp_kv_cache_interleave_size": args.cp_kv_cache_interleave_size}


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        told = f"must be numbers with commas between, got {text!r}"
        raise argparse.ArgumentTypeError(told) from None
