"""Several GPUs of one host against one: attention, sums, steps of an 8B-wide Qwen3, a long loop, an engine.

Nothing is timed before its results are one device's. A row is written when it is there.
"""

import argparse
import faulthandler
import time
from typing import Any, NamedTuple

import jax

from benchmarks.mesh import processes
from benchmarks.mesh.all_reduce import measure_sums
from benchmarks.mesh.attention import measure_attention
from benchmarks.mesh.loop import measure_decode_loop, measure_loop
from benchmarks.mesh.nano import NanoCase, measure_nano
from benchmarks.mesh.prefill import PromptCase, measure_prompt
from benchmarks.mesh.steps import StepSize, measure_large, measure_steps
from benchmarks.models.graphs import LLAMA_8B, flags
from benchmarks.runner import Rows
from benchmarks.serving.engine import QWEN3_8B
from jattn.parallel import make_mesh
from pallas_kernels.cases import DecodeCase

CASES = ("attention", "long", "prompt", "sums", "steps", "loop", "decode_loop", "nano", "large")
OF_PROCESSES = tuple(name for name in CASES if name != "nano")


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
        attention: A decode step's attention.
        long: That of one long request.
        prompt: A long prompt's.
        sums: Rows and width of what is summed.
        config: Of the model.
        steps: Of decodes, and of prompts.
        loop: The model of the loop, its step, and how many of them.
        decode_loop: Of `config`'s loop on the device: a round, and how many.
        nano: Of nano-vllm's workload.
        large: A model that one device has no room for, its step, how keys are stored.
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
)
TINY = QWEN3_8B | {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
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
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks mesh` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--cp", type=int, nargs="+", default=[1], help="of them, that keys lie on; of steps and large alone"
    )
    parser.add_argument("--sizes", nargs="+", help="of sums and steps only these, such as 64x4096")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU runs in seconds")
    parser.add_argument(
        "--peer-memory", action="store_true", help="merges and steps go by it, too; loops and nano alone"
    )
    parser.add_argument("--no-nccl", action="store_true", help="with --peer-memory: steps by it alone")
    parser.add_argument("--kernels", action="store_true", help="large lists the kernels of a step, too")
    parser.add_argument("--stall", type=float, help="end the program if a row takes more seconds than this")
    parser.add_argument("--out", help="folder of the rows")
    processes.add_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Every case on one device and on several; of several processes the first writes the rows."""
    count, cases = arguments.devices, CASES if arguments.processes == 1 else OF_PROCESSES
    if arguments.processes > 1 and (others := set(arguments.cases) - set(cases)):
        raise SystemExit(f"{sorted(others)} are no cases of several processes ({', '.join(cases)}): no rows")
    if processes.is_started_elsewhere(arguments):
        return
    if len(jax.devices()) < count:
        print(f"mesh: {count} devices are wanted, {len(jax.devices())} are here: no rows", flush=True)
        return
    rows, mesh = Rows("mesh", arguments.out), make_mesh(tp=count)
    if bad := [cp for cp in arguments.cp if count % cp]:
        raise SystemExit(f"{count} devices are no equal parts of {bad[0]} ranks: no rows")
    layouts = [make_mesh(tp=count // cp, cp=cp) for cp in arguments.cp]
    sizes, by_peers = SMALL if arguments.small else LARGE, {"uses_peers": arguments.peer_memory}
    all_sums = ("psum", "all_reduce") if arguments.peer_memory else ("psum",)
    sums = all_sums[1:] if arguments.no_nccl else all_sums
    if not sums:
        raise SystemExit("--no-nccl needs --peer-memory: no rows")
    is_chosen = lambda name: arguments.sizes is None or name in arguments.sizes
    steps = [size for size in sizes.steps if is_chosen(size.name)]
    summed = tuple((rows, width) for rows, width in sizes.sums if is_chosen(f"{rows}x{width}"))
    measures = {
        "attention": lambda: measure_attention(sizes.attention, mesh, **by_peers),
        "long": lambda: measure_attention(sizes.long, mesh, **by_peers),
        "prompt": lambda: measure_prompt(sizes.prompt, mesh),
        "sums": lambda: measure_sums(summed, mesh),
        "steps": lambda: measure_steps(sizes.config, steps, layouts, sums),
        "loop": lambda: measure_loop(*sizes.loop, mesh, sums[-1]),
        "decode_loop": lambda: measure_decode_loop(sizes.config, *sizes.decode_loop, mesh, sums),
        "nano": lambda: measure_nano(sizes.nano, mesh, **by_peers),
        "large": lambda: measure_large(*sizes.large, layouts, sums[-1:], lists_kernels=arguments.kernels),
    }
    start = time.perf_counter()
    for name in arguments.cases or cases:
        _restart_watchdog(arguments.stall)
        for row in measures[name]():
            _restart_watchdog(arguments.stall)
            if jax.process_index() == 0:
                where = {"num_devices": count, "processes": jax.process_count()}
                rows.add(**row, **where, after_s=time.perf_counter() - start, **flags())
    faulthandler.cancel_dump_traceback_later()


def _restart_watchdog(seconds: float | None) -> None:
    """End the program with the stacks of its threads if this is not called again within `seconds`."""
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)
