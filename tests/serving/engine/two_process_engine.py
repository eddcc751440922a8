"""One of two processes, with two CPU devices each, that run one engine; the other follows.

For "keys" each process has one device, which holds half of the keys of each request.

Run by tests/serving/engine/test_processes.py: PORT RANK FOLDER SCENARIO.
"""

import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import jax

PORT, RANK, FOLDER, WHAT = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4]
MESH = {"cp": 2} if WHAT == "keys" else {"tp": 4}
jax.config.update("jax_num_cpu_devices", 1 if WHAT == "keys" else 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, RANK)

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

import jattn  # noqa: E402
from jattn.models import load  # noqa: E402
from jattn.serving import Engine  # noqa: E402
from tests.serving.engine.faults import device_fails  # noqa: E402
from tests.serving.engine.process_requests import (  # noqa: E402
    PROMPTS,
    SIZES,
    request_results,
    scales_of,
    speculative_results,
)


def main() -> None:
    dtype = "bfloat16" if WHAT == "unlike" and RANK > 0 else None
    model = load(FOLDER, dtype=dtype, mesh=jattn.parallel.make_mesh(**MESH), progress=False)
    if WHAT == "serve":
        print(json.dumps(scales_of(model)), flush=True)
    run(model, WHAT)
    if WHAT == "serve":  # one engine after another
        run(model, "draft model")


def run(model: Any, scenario: str) -> None:
    sizes = dict(SIZES)
    if scenario == "unlike":
        sizes["max_num_seqs"] = 2 + RANK
    if scenario == "serve":
        sizes |= {"num_blocks": None, "cache_bytes": 2**19 * (1 + RANK)}
    if scenario == "draft model":
        sizes["speculative"] = FOLDER / "draft"
    engine = Engine(model, **sizes)
    if RANK > 0:
        follow(engine)
    else:
        LEADS[scenario](engine)
        engine.close()


def serve(engine: Engine) -> None:
    engine.precompile(progress=False)
    tokens = request_results(engine)
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(load(FOLDER, progress=False))))
    engine.update_weights(jax.tree.map(np.zeros_like, state))
    zeros = [[result.token_ids] for result in engine.generate(PROMPTS, max_tokens=12)]
    engine.update_weights(state)
    answers = {
        "found": tokens,
        "zeros": zeros,
        "again": request_results(engine),
        "num_blocks": engine.stats.num_blocks,
    }
    print(json.dumps(answers), flush=True)


def draft(engine: Engine) -> None:
    print(json.dumps(speculative_results(engine)), flush=True)


def fail() -> None:
    print(json.dumps({"failed_at": time.time()}), flush=True)
    raise RuntimeError("it has had enough")


def fail_soon(engine: Engine) -> None:
    engine.generate([[1, 2, 3]], max_tokens=2)
    fail()


def fail_in_a_step(engine: Engine) -> None:
    """Fail in a step that the other process has started."""
    engine.generate([[1, 2, 3]], max_tokens=2)
    print(json.dumps({"failed_at": time.time()}), flush=True)
    with device_fails(engine):
        engine.generate([[1, 2, 3]], max_tokens=2)


def resume_fork(engine: Engine) -> None:
    while True:
        engine.generate([[1, 2, 3]], max_tokens=8)


LEADS = {"serve": serve, "keys": draft, "draft model": draft}
LEADS |= {"leader fails": fail_soon, "leader fails in a step": fail_in_a_step}
LEADS |= {"follower fails": resume_fork, "follower is killed": resume_fork}


def follow(engine: Engine) -> None:
    try:
        engine.generate([[1]], max_tokens=1)
    except ValueError as error:
        print(error, flush=True)
    runner, steps = engine._runner, []
    run = runner.run

    def fails_in_the_fifth(inputs: Any) -> Any:
        steps.append(inputs)
        if len(steps) == 5:
            if WHAT == "follower fails":
                fail()
            print(json.dumps({"failed_at": time.time()}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return run(inputs)

    if WHAT.startswith("follower "):
        runner.run = fails_in_the_fifth
    engine.follow()
    print("followed", flush=True)


if __name__ == "__main__":
    main()
