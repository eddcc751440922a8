"""Run decoders with context parallelism on eight CPU devices and compare with transformers and one device.

Run by tests/models/test_sharding_context_parallel.py with the names of checks: see `run`.
"""

import functools
import math
import pathlib
import re
import sys
import tempfile
from typing import Any

import jax

from tests.models.sharded_decoders import EXCHANGES, METADATA, last_logits

jax.config.update("jax_num_cpu_devices", 8)  # there it is 4

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

import jattn  # noqa: E402
from jattn.models import Decoder, DecoderConfig, load, save  # noqa: E402
from jattn.models.loading.pretrained import read_config  # noqa: E402
from jattn.parallel import make_mesh  # noqa: E402
from jattn.serving import Engine, SamplingParams  # noqa: E402
from jattn.serving.cli.main import main as command_line  # noqa: E402
from jattn.serving.engine.config import longrope_threshold_of  # noqa: E402
from tests.conftest import GOLDEN  # noqa: E402
from tests.models.tiny_checkpoints import OFTEN  # noqa: E402
from tests.serving.tiny import one_layer_model  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9, [20] * 40]
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 33,
    "block_size": 4,
    "max_model_len": 96,
}
BUCKETS = [
    jattn.Bucket(max_decodes=4, max_blocks=24),
    jattn.Bucket(max_decodes=4, max_prefills=4, max_prefill_tokens=32, max_blocks=24),
]


def mesh_of(tp: int, cp: int, interleave: int = 1) -> dict:
    return {"mesh": make_mesh(tp=tp, cp=cp), "cp_kv_cache_interleave_size": interleave, "progress": False}


def check_family(name: str) -> None:
    """Check that a prompt in two parts and single tokens gives transformers' logits."""
    expected = np.load(GOLDEN / "hf" / name / "expected.npz")
    prompt, expected_logits = np.asarray(expected["prompt3"], np.int32), expected["logits3"]
    model = load(GOLDEN / "hf" / name, **mesh_of(1, 2))
    caches, table, done, logits = model.create_caches(16, block_size=16), np.arange(1, 9)[None, ::-1], 0, []
    half, has_threshold = len(prompt) // 2, longrope_threshold_of(model) is not None
    for count in [len(prompt)] if has_threshold else (half, len(prompt) - half - 2, 1, 1):
        done += count
        metadata = jattn.build_batch_metadata([count], [done], table, block_size=16)
        actual, caches = last_logits(model, prompt[done - count : done], caches, metadata)
        logits.append(np.asarray(actual))
    error = np.abs(np.concatenate(logits) - expected_logits).max()
    tolerance = max(2e-5, 4e-6 * np.abs(expected_logits[expected_logits > np.finfo(np.float32).min]).max())
    assert error < tolerance, f"{name}: {error}, allowed {tolerance}"
    print(f"{name}: {error:.1e}")


def parts_of(array: jax.Array) -> set[int]:
    """Return the number of equal, distinct parts into which devices split an array."""
    shards = array.addressable_shards
    assert len({str(shard.index) for shard in shards}) == len(shards), array.sharding
    return {array.size // shard.data.size for shard in shards}


def generated_tokens(engine: Engine, **params: int) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(PROMPTS, max_tokens=12, **params)]


def check_engine(folder: pathlib.Path, tp: int, cp: int, expected: list[list[int]], alone: Engine) -> None:
    """Check one executable per bucket, equal tokens, and that each device holds 1 / (tp * cp) of the
    cache.
    """
    engine = Engine(load(folder, **mesh_of(tp, cp)), **SIZES, buckets=BUCKETS, check_batches=True)
    engine.precompile(progress=False)
    num_compiles = engine.stats.num_compiles
    assert generated_tokens(engine) == expected
    assert engine.stats.num_compiles == num_compiles
    caches = jax.tree.leaves(engine._runner._caches)
    assert all(parts_of(array) == {tp * cp} for array in caches)
    # As many blocks on a device, each of as many tokens of fewer heads; requests have cp times the room.
    per_device = sum(array.nbytes for array in caches) // (tp * cp)
    assert per_device * tp == sum(array.nbytes for array in jax.tree.leaves(alone._runner._caches))
    capacity = lambda engine: (
        engine.scheduler.block_manager.capacity * engine.scheduler.block_manager.block_size
    )
    assert capacity(engine) == cp * capacity(alone)
    for bucket, executable in engine.graphs.executables.items():
        check_executable(executable, bucket, engine, tp, cp, per_device)
    print(f"tp {tp}, cp {cp}: {num_compiles} executables, {per_device} bytes of cache")


def check_executable(executable, bucket, engine: Engine, tp: int, cp: int, cache_bytes: int) -> None:
    """Check the collectives: those of tensor parallelism, and log-sum-exps of all ranks per layer."""
    config = engine.model.config
    layers, heads = config.num_hidden_layers, config.num_attention_heads // tp
    collectives = EXCHANGES.findall(executable.as_text())
    assert [kind for _, kind in collectives].count("all-reduce") == 1 + 2 * layers, collectives
    gathered = [re.match(r"(\w+)\[([\d,]+)\]", shape) for shape, kind in collectives if kind != "all-reduce"]
    sizes = [(match[1], math.prod(map(int, match[2].split(",")))) for match in gathered]
    assert sizes == [("f32", cp * heads * bucket.max_tokens)] * layers, collectives
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes, (memory, cache_bytes)
    params = sum(array.nbytes for array in jax.tree.leaves(jax.device_get(engine._runner.weights.state)))
    assert memory.argument_size_in_bytes < params / tp + cache_bytes + METADATA, (memory, params, cache_bytes)


DRAFTS = {"speculative": "ngram", "num_speculative_tokens": 3, "buckets": None}
# Other engine features, and the counters that show their use.
FEATURES = {
    "int8 cache, scales per token and head, interleaved by four": (
        {"kv_cache_dtype": "int8_token_head", "block_size": 8}, ["num_prefix_hit_tokens"],
    ),
    "int8 cache, scales per channel": ({"kv_cache_dtype": "int8_static_v"}, []),
    "batch_invariant": ({"batch_invariant": True, "buckets": None}, []),
    "preempted": ({"num_blocks": 14}, ["num_preemptions"]),  # blocks of two devices' tokens
    "drafts of ngrams": (DRAFTS, ["num_accepted_tokens"]),
    "cascades": ({"cascade_attention": True}, ["num_cascade_steps"]),
}  # fmt: skip


def check_feature(folder: pathlib.Path, name: str) -> None:
    """Check that an engine with a feature on a mesh has one device's tokens.

    Only quantization changes tokens, so without it one device has a plain engine, which is made once.
    """
    options, counted = FEATURES[name]
    prompts = [PROMPTS[2] + prompt for prompt in PROMPTS]
    if name == "preempted":  # they begin together, and there is no room for what becomes of them
        prompts = [[token] * 28 for token in (1, 2, 3)]
    if "kv_cache_dtype" in options:
        alone = engine_with(load(folder, progress=False), options)
    else:
        alone = plain_engine(folder)
    engine = engine_with(load(folder, **mesh_of(2, 2, 4 if "four" in name else 1)), options)
    expected, actual = (feature_results(engine, prompts) for engine in (alone, engine))
    assert actual == expected, (name, actual, expected)
    for stat in counted:
        assert getattr(engine.stats, stat) > 0, (name, stat)
    print(name)


def engine_with(model: Decoder, options: dict[str, Any]) -> Engine:
    if options.get("kv_cache_dtype") == "int8_static_v":  # static scales
        model.kv_scales = jattn.calibrate(model, PROMPTS, quantization=options["kv_cache_dtype"])
    return Engine(model, **{**SIZES, "buckets": BUCKETS, **options}, check_batches=True)


@functools.cache
def plain_engine(folder: pathlib.Path) -> Engine:
    return engine_with(load(folder, progress=False), {})


def feature_results(engine: Engine, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Return tokens of prompts, of the same prompts again, and of two completions of one prompt."""
    first = [result.token_ids for result in engine.generate(prompts, max_tokens=12)]
    repeated = [result.token_ids for result in engine.generate(prompts, max_tokens=12)]
    forks = engine.generate(PROMPTS[1:2], SamplingParams(n=2, temperature=0.8, seed=0, max_tokens=12))
    return [first, repeated, [completion.token_ids for completion in forks[0].outputs]]


def check_scales(folder: pathlib.Path) -> None:
    """Check that scales equal one device's for any interleave; blocks of 16 are not whole rounds."""
    prompts = PROMPTS[1:2]
    models = load(folder, progress=False), load(folder, **mesh_of(1, 2, 5))
    expected, actual = (jattn.calibrate(model, prompts, per_head=True).layers for model in models)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)
    print("scales")


def check_groups(folder: pathlib.Path) -> None:
    """Check that sliding-window layers have their own blocks and tokens equal one device's."""
    hf = read_config(GOLDEN / "hf" / "gemma3").to_hf()
    hf |= {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "eos_token_id": None,
    }
    save(Decoder(DecoderConfig.from_hf(hf), rngs=nnx.Rngs(0)), folder)
    results, prompts = [], [list(range(1, 60)), *PROMPTS]
    sizes = SIZES | {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    buckets = [
        jattn.Bucket(max_decodes=2, max_blocks=24),
        jattn.Bucket(max_decodes=2, max_prefills=2, max_prefill_tokens=16, max_blocks=24),
    ]
    for mesh in ({"progress": False}, mesh_of(2, 2)):
        model = load(folder, **mesh)
        engine = Engine(model, **sizes, buckets=buckets, check_batches=True)
        first = [result.token_ids for result in engine.generate(prompts, max_tokens=12)]
        repeated = [result.token_ids for result in engine.generate(prompts[-1:], max_tokens=12)]
        forks = engine.generate(prompts[:1], SamplingParams(n=2, temperature=0.8, seed=0, max_tokens=12))
        results.append([first, repeated, [completion.token_ids for completion in forks[0].outputs]])
        blocks = [len(cache.k) for cache in engine._runner._caches]
        sliding_window_manager = [
            num
            for num, uses_sliding_window in zip(blocks, model.sliding_window_layers, strict=True)
            if uses_sliding_window
        ]
        assert max(sliding_window_manager) < max(blocks) == SIZES["num_blocks"], blocks
        assert engine.stats.num_prefix_hit_tokens > 0
    assert results[0] == results[1], results
    print("groups")


def run(check: str) -> None:
    if check in ("families", "other_families"):
        for path in sorted((GOLDEN / "hf").glob("*/expected.npz")):
            if (path.parent.name in OFTEN) == (check == "families"):
                check_family(path.parent.name)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        save(one_layer_model(num_layers=1 if check == "features" else 2, **heads), folder)
        if check == "features":
            for feature in FEATURES:
                check_feature(folder, feature)
            check_scales(folder)
            check_groups(folder / "gemma3")
            return
        alone = Engine(load(folder, progress=False), **SIZES, buckets=BUCKETS)
        expected = generated_tokens(alone)
        for tp, cp in ((1, 2), (2, 4)):
            check_engine(folder, tp, cp, expected, alone)
        sizes = ["--tensor-parallel-size", "4", "--decode-context-parallel-size", "2"]
        assert command_line(["doctor", "--model", str(folder), *sizes, "--num-blocks", "9"]) == 0


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(name)
