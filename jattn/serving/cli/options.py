"""Command-line options that several commands share."""

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jattn.cache.spec import QUANTIZATION_ALIASES, QUANTIZATIONS
from jattn.implementations.selection import IMPLEMENTATIONS
from jattn.models.collectives import use_peer_memory, why_not_peer_memory
from jattn.models.kv_scales import CalibrationWarning
from jattn.parallel import make_mesh
from jattn.serving.cli.parser import OneLineParser
from jattn.serving.engine.config import NGRAM
from jattn.serving.engine.engine import Engine
from pallas_kernels.checks import require_positive

MODEL_HELP = "Hugging Face model: a folder, or a name on the Hub such as org/name"
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
DTYPES = ("bfloat16", "float16", "float32")
VLLM_DTYPES = {"auto": None, "half": "float16", "float": "float32"}  # further values of vLLM's --dtype
ENGINE_OPTIONS = (  # Arguments of Engine that have an option of the same name.
    *("implementation", "kv_cache_dtype", "skip_layers", "max_num_seqs", "max_num_batched_tokens"),
    *("block_size", "num_blocks", "max_model_len", "enable_prefix_caching", "cache_dir"),
    *("speculative", "num_speculative_tokens", "cascade_attention", "batch_invariant"),
)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add the required option that selects the model."""
    parser.add_argument("--model", required=True, metavar="NAME", help=MODEL_HELP)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that configure the engine."""
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the Hub (default: the Hub's default branch)",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="module or .py file to import first, such as one that registers a model family; may be repeated",
    )
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights, for benchmarks; only the configuration is read (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=[*VLLM_DTYPES, *DTYPES],
        default="auto",
        help="data type of weights and activations; auto is the checkpoint's (default: %(default)s)",
    )
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="attention implementation (default: the fastest one that supports the model)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=[*QUANTIZATION_ALIASES, *filter(None, QUANTIZATIONS), *DTYPES],
        default="auto",
        help="storage of the KV cache; auto is the model's data type (default: %(default)s)",
    )
    parser.add_argument(
        "--skip-layers",
        type=_parse_layers,
        action="extend",
        default=[],
        metavar="N,N",
        help="comma-separated indices of layers whose KV cache is not quantized (default: none)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="maximum number of requests per step (default: depends on the device)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens per step (default: depends on the device)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=16,
        metavar="N",
        help="tokens per KV-cache block (default: %(default)s)",
    )
    parser.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help="number of KV-cache blocks per layer (default: as many as fit in device memory)",
    )
    parser.add_argument(
        "--max-model-len",
        type=_parse_max_model_len,
        metavar="N",
        help="maximum context length, in tokens; 4k is 4000, 4K is 4096 (default, or -1: the model's)",
    )
    parser.add_argument(
        "--speculative",
        metavar="METHOD",
        help='source of draft tokens: "ngram", or the folder or Hub name of a draft model (default: none)',
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=4,
        metavar="N",
        help="number of draft tokens per request and step (default: %(default)s)",
    )
    parser.add_argument(
        "--cascade-attention",
        action=argparse.BooleanOptionalAction,
        help="read a prefix that all decoding requests share once per step (default: when it is faster)",
    )
    parser.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="make each output bitwise independent of the other requests in the batch; slower",
    )
    _add_parallel_options(parser)
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder that keeps compiled executables for the next start (default: none)",
    )
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV cache of prompts with a common prefix (default: enabled)",
    )


def _add_parallel_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for several devices, named as in vLLM."""
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="number of devices to shard the model over (default: %(default)s)",
    )
    parser.add_argument(
        "--decode-context-parallel-size",
        "-dcp",
        type=int,
        default=1,
        metavar="N",
        help="how many of these devices shard the KV cache of each request by tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--cp-kv-cache-interleave-size",
        type=int,
        default=1,
        metavar="N",
        help="number of consecutive tokens stored on the same context-parallel device (default: %(default)s)",
    )
    parser.add_argument(
        "--disable-custom-all-reduce",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="always use NCCL for all-reduce, also in steps of few tokens",
    )


def add_sampling_options(parser: argparse.ArgumentParser, remote: str = "") -> None:
    """Add the options that configure sampling.

    Args:
        parser: Parser of the command.
        remote: Addition to the description of the defaults that the checkpoint sets.
    """
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"sampling temperature; 0 is greedy (default: the checkpoint's, else 0{remote})",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help=f"sample from the K most likely tokens (default: the checkpoint's, else all{remote})",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P"
        f" (default: the checkpoint's, else 1{remote})",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="minimum probability of a token, relative to the most likely one"
        f" (default: the checkpoint's, else 0{remote})",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="random seed for reproducible sampling (default: none)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop string, which ends the output and is not part of it; may be repeated",
    )


def import_extra(command: str, module: str) -> Any:
    """Import a module that needs the extra 'serve'.

    Raises:
        ImportError: If the extra is not installed. The message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"jattn {command} needs {error.name} of the extra 'serve': pip install '.[serve]' in a checkout."
        ) from error


def option_name(name: str) -> str:
    """Return the command-line spelling of an attribute of the parsed arguments."""
    return f"--{name.replace('_', '-')}"


def require_defaults(args: argparse.Namespace, adders: Sequence[Callable[..., None]], reason: str) -> None:
    """Reject options that would have no effect.

    Args:
        args: Parsed arguments of the command.
        adders: Functions that added the options in question to the command's parser.
        reason: Predicate that completes the sentence, after the option's name.

    Raises:
        ValueError: If one of the options differs from its default; the message names it.
    """
    parser: argparse.ArgumentParser = OneLineParser()
    for add_options in adders:
        add_options(parser)
    for name, default in vars(parser.parse_args([])).items():
        if getattr(args, name) != default:
            raise ValueError(f"{option_name(name)} {reason}")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that are set on the command line, as arguments of SamplingParams."""
    return {name: value for name in SAMPLING_OPTIONS if (value := getattr(args, name)) is not None}


def make_engine(args: argparse.Namespace, load: Callable[..., Any], *, seed: int | None = None) -> Any:
    """Return the Engine that the options describe; print warnings about missing cache scales to stderr.

    Args:
        args: Parsed arguments of the command.
        load: Function that loads a model, such as `jattn.models.load`.
        seed: Random seed of requests without a seed; see `Engine`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CalibrationWarning)
        dtype = VLLM_DTYPES.get(args.dtype, args.dtype)
        load_options = {"dtype": dtype, "load_format": args.load_format, **_mesh_options(args)}
        model = load(args.model, revision=args.revision, **load_options)
        # The custom all-reduce requires that one engine at a time runs on the devices, as it does here.
        allows_custom_all_reduce = not (args.disable_custom_all_reduce or args.batch_invariant)
        if allows_custom_all_reduce and why_not_peer_memory(model) is None:
            use_peer_memory(model)
        engine_options = {name: getattr(args, name) for name in ENGINE_OPTIONS}
        if args.speculative not in (None, NGRAM):
            engine_options["speculative"] = load(args.speculative, **load_options)
        engine = Engine(model, **engine_options | {"skip_layers": tuple(args.skip_layers)}, seed=seed)
    for warning in caught:
        print(f"jattn: {warning.message}", file=sys.stderr)
    return engine


def _mesh_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `load` for several devices; vLLM counts all of them as tensor parallel.

    Raises:
        ValueError: If the sizes do not fit each other or the number of devices.
    """
    size, cp = args.tensor_parallel_size, args.decode_context_parallel_size
    require_positive(decode_context_parallel_size=cp)
    if size % cp:
        raise ValueError(
            f"--tensor-parallel-size must be a multiple of --decode-context-parallel-size ({cp}), got {size}."
        )
    if size > jax.device_count():
        raise ValueError(
            f"--tensor-parallel-size {size} needs {size} devices, but JAX has {jax.device_count()}. Reduce "
            "it."
        )
    mesh = None if size == 1 else make_mesh(tp=size // cp, cp=cp)
    return {"mesh": mesh, "cp_kv_cache_interleave_size": args.cp_kv_cache_interleave_size}


def _parse_max_model_len(text: str) -> int | None:
    """Return a number of tokens; as in vLLM, k stands for 1000 and K for 1024. -1 is the default, None."""
    if text == "-1":
        return None
    factor = {"k": 1000, "K": 1024}.get(text[-1:], 1)
    try:
        return int(text if factor == 1 else text[:-1]) * factor
    except ValueError:
        message = f"must be a number of tokens such as 4096, 4k or 4K, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        message = f"must be comma-separated layer indices, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
