"""Several GPUs of one host against one: attention, all-reduce, decode steps and loops, an engine.

A case is timed after its results agreed with those of one device. Every row is written as soon as it is
measured.
"""

import argparse
import faulthandler
import time
from typing import Any, NamedTuple

import jax

from benchmarks.kernels.cases import DecodeCase
from benchmarks.mesh import processes
from benchmarks.mesh.all_reduce import measure_sums
from benchmarks.mesh.attention import measure_attention
from benchmarks.mesh.loop import measure_decode_loop, measure_large_loop, measure_loop
from benchmarks.mesh.nano import NanoCase, measure_nano
from benchmarks.mesh.prefill import PromptCase, measure_prompt
from benchmarks.mesh.steps import StepSize, measure_large, measure_steps
from benchmarks.models.graphs import LLAMA_8B, flags
from benchmarks.runner import Rows
from benchmarks.serving.engine import QWEN3_8B
from jattn.parallel import make_mesh

CASES = ("attention", "long", "prompt", "sums", "steps", "loop", "decode_loop", "nano", "large", "large_loop")
MULTI_PROCESS_CASES = tuple(name for name in CASES if name != "nano")


class Sizes(NamedTuple):
    """Sizes of the cases.

    Attributes:
        attention: Attention of a decode step.
        long: Attention of a decode step with one long request.
        prompt: Attention of a long prompt.
        sums: Rows and width of each array to all-reduce.
        config: Contents of the model's config.json.
        steps: Decode steps and steps with prompts.
        loop: Config of the model of a loop of steps, its step, and the number of steps.
        decode_loop: Step of a decode_loop with the model of `config`, and its number of rounds.
        nano: Part of nano-vllm's workload.
        large: Config of a model that is too large for one device, its step, and the format of its cache.
        large_loop: Number of rounds of a decode_loop of this model.
        chain: Number of attend calls in `attention` and `long` that share a plan and a launch. A step of a
            model has one plan and one launch, too, for 32 or more layers.
    """

    attention: DecodeCase
    long: DecodeCase
    prompt: PromptCase
    sums: tuple[tuple[int, int], ...]
    config: dict[str, Any]
    steps: tuple[StepSize, ...]
    loop: tuple[dict[str, Any], StepSize, int]
    decode_loop: tuple[StepSize, int]
    nano: NanoCase
    large: tuple[dict[str, Any], StepSize, str]
    large_loop: int
    chain: int


LOOP = QWEN3_8B | {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
LOOP |= {"num_attention_heads": 8, "num_key_value_heads": 2}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64}
LARGE = Sizes(
    DecodeCase(name="8x128k", q_heads=32, kv_heads=8, head_dim=128, kv_lens=(131072,) * 8),
    DecodeCase(name="1x1m", q_heads=32, kv_heads=8, head_dim=128, kv_lens=(2**20,)),
    PromptCase("256k", tokens=2**18, chunk=8192, q_heads=32, kv_heads=8, head_dim=128),
    (*((rows, 4096) for rows in (1, 8, 64, 256, 1024, 2048)), *((rows, 8192) for rows in (1, 8, 64, 256))),
    QWEN3_8B,
    (*map(StepSize, (1, 64, 256), (1024, 4096, 1024)), StepSize(2, 512, 512), StepSize(2, 1024, 1024)),
    (LOOP, StepSize(8, 512), 10_000),
    (StepSize(1, 1024), 64),
    NanoCase(QWEN3_8B, 256, 1024, (16, 32, 64, 96, 128, 160, 192, 224, 256), (512, 2048, 8192), 24_000),
    (LLAMA_70B, StepSize(64, 4096), "fp8_per_token_head"),
    16,
    32,
)
TINY = QWEN3_8B | {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
TINY |= {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256}
SMALL = Sizes(
    DecodeCase(name="2x128", q_heads=8, kv_heads=8, head_dim=16, kv_lens=(128,) * 2),
    DecodeCase(name="1x256", q_heads=8, kv_heads=8, head_dim=16, kv_lens=(256,)),
    PromptCase("96", tokens=96, chunk=32, q_heads=8, kv_heads=8, head_dim=16),
    ((1, 64), (2, 64)),
    TINY,
    (StepSize(1, 32), StepSize(3, 64), StepSize(2, 24, 24)),
    (TINY, StepSize(3, 48), 20),
    (StepSize(3, 48), 5),
    NanoCase(TINY | {"vocab_size": 10_112, "max_position_embeddings": 512}, 4, 24, (4,), (256,), 200),
    (TINY, StepSize(3, 64), "fp8_per_token_head"),
    5,
    2,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks mesh`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(CASES)}. Default: all.")
    parser.add_argument("--devices", type=int, default=2, help="Number of devices. Default: 2.")
    parser.add_argument(
        "--cp",
        type=int,
        nargs="+",
        default=[1],
        help="Numbers of ranks that keys are distributed over, for `steps` and `large`. Default: 1.",
    )
    parser.add_argument(
        "--sizes", nargs="+", help="Sizes of `sums` and `steps`, such as 64x4096. Default: all."
    )
    parser.add_argument("--small", action="store_true", help="Use sizes that a CPU runs in seconds.")
    parser.add_argument(
        "--peer-memory",
        action="store_true",
        help="Measure all-reduce through peer memory, too; `loop` and `nano` use it instead of NCCL.",
    )
    parser.add_argument(
        "--no-nccl", action="store_true", help="With --peer-memory: leave out steps with NCCL."
    )
    parser.add_argument("--kernels", action="store_true", help="List the kernels of a step of `large`.")
    parser.add_argument(
        "--stall", type=float, help="Seconds without a new row after which the program exits."
    )
    parser.add_argument("--out", help="Directory for the result rows.")
    processes.add_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Run the cases. With several processes, the first one writes the rows."""
    num_devices, cases = arguments.devices, CASES if arguments.processes == 1 else MULTI_PROCESS_CASES
    if arguments.processes > 1 and (unsupported := set(arguments.cases) - set(cases)):
        raise SystemExit(f"{sorted(unsupported)} run in one process only. Use {', '.join(cases)}.")
    if processes.launch_or_join(arguments):
        return
    if len(jax.devices()) < num_devices:
        print(
            f"mesh: needs {num_devices} devices, found {len(jax.devices())}. No rows are recorded.",
            flush=True,
        )
        return
    rows, mesh = Rows("mesh", arguments.out), make_mesh(tp=num_devices)
    if invalid := [cp for cp in arguments.cp if num_devices % cp]:
        raise SystemExit(f"--devices {num_devices} must be a multiple of --cp {invalid[0]}.")
    layouts = [make_mesh(tp=num_devices // cp, cp=cp) for cp in arguments.cp]
    sizes, uses_peers = SMALL if arguments.small else LARGE, arguments.peer_memory
    all_sums = ("psum", "all_reduce") if uses_peers else ("psum",)
    sums = all_sums[1:] if arguments.no_nccl else all_sums
    if not sums:
        raise SystemExit("--no-nccl requires --peer-memory.")
    sum_names = {f"{rows}x{width}": (rows, width) for rows, width in sizes.sums}
    selected = arguments.sizes or [*sum_names, *(size.name for size in sizes.steps)]
    steps = [size for size in sizes.steps if size.name in selected]
    sum_sizes = tuple(size for name, size in sum_names.items() if name in selected)
    measures = {
        "attention": lambda: measure_attention(sizes.attention, mesh, sizes.chain, uses_peers=uses_peers),
        "long": lambda: measure_attention(sizes.long, mesh, sizes.chain, uses_peers=uses_peers),
        "prompt": lambda: measure_prompt(sizes.prompt, mesh),
        "sums": lambda: measure_sums(sum_sizes, mesh),
        "steps": lambda: measure_steps(sizes.config, steps, layouts, sums),
        "loop": lambda: measure_loop(*sizes.loop, mesh, sums[-1]),
        "decode_loop": lambda: measure_decode_loop(sizes.config, *sizes.decode_loop, mesh, sums),
        "nano": lambda: measure_nano(sizes.nano, mesh, uses_peers=uses_peers),
        "large": lambda: measure_large(*sizes.large, layouts, sums[-1:], lists_kernels=arguments.kernels),
        "large_loop": lambda: measure_large_loop(*sizes.large, sizes.large_loop, mesh, sums[-1]),
    }
    start = time.perf_counter()
    for name in arguments.cases or cases:
        _restart_watchdog(arguments.stall)
        for row in measures[name]():
            _restart_watchdog(arguments.stall)
            if jax.process_index() == 0:
                devices = {"num_devices": num_devices, "processes": jax.process_count()}
                rows.add(**row, **devices, after_s=time.perf_counter() - start, **flags())
    faulthandler.cancel_dump_traceback_later()


def _restart_watchdog(seconds: float | None) -> None:
    """Exit with the stacks of all threads unless this function is called again within `seconds`."""
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)
