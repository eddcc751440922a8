"""Run decoders on meshes of CPU devices and compare them with transformers and one device.

Run by tests/models/test_sharding.py with the names of checks: see `run`.
"""

import functools
import pathlib
import re
import sys
import tempfile
from typing import Any, NamedTuple

import jax

jax.config.update("jax_num_cpu_devices", 6)
jax.config.update("jax_numpy_dtype_promotion", "strict")

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

import jattn  # noqa: E402
from jattn.models import Decoder, DecoderConfig, load, save  # noqa: E402
from jattn.models.loading.pretrained import read_config  # noqa: E402
from jattn.models.mesh_padding import pad_to_mesh  # noqa: E402
from jattn.runtime.decode_loop import DecodeLoopOutput, decode_loop  # noqa: E402
from jattn.serving import Engine  # noqa: E402
from jattn.serving.cli.main import main as command_line  # noqa: E402
from tests.assertions import record_compilations  # noqa: E402
from tests.conftest import GOLDEN  # noqa: E402
from tests.models.tiny_checkpoints import OFTEN  # noqa: E402
from tests.serving.tiny import one_layer_model  # noqa: E402

TWO_ONLY = ("llama4", "phi3small")  # 160 wide inside, and 6 heads
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9, [20] * 40]
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 64}
METADATA = 2**13  # bytes of what all devices have, at most
EXCHANGES = re.compile(
    r"= (\S+)\{\S* (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@jax.jit
def last_logits(model, token_ids, caches, metadata):
    plan = model.plan(metadata, caches)
    hidden, caches = model(token_ids, caches, metadata, plan=plan)
    return model.logits(hidden), caches


def check_family(name: str, tp: int) -> None:
    """Check that a prompt through the caches gives transformers' logits."""
    model = load(GOLDEN / "hf" / name, mesh=jattn.parallel.make_mesh(tp=tp), progress=False)
    expected = np.load(GOLDEN / "hf" / name / "expected.npz")
    prompt, expected_logits = expected["prompt3"], expected["logits3"]
    metadata = jattn.build_batch_metadata([len(prompt)], [len(prompt)], np.arange(1, 9)[None])
    actual, caches = last_logits(model, np.asarray(prompt, np.int32), model.create_caches(16), metadata)
    error = np.abs(np.asarray(actual) - expected_logits).max()
    tolerance = max(2e-5, 4e-6 * np.abs(expected_logits[expected_logits > np.finfo(np.float32).min]).max())
    assert error < tolerance, f"{name}: {error}, allowed {tolerance}"
    assert all(is_cut(array, tp) for cache in caches for array in (cache.k, cache.v)), name
    print(f"{name} on {tp}: {error:.1e}")


def is_cut(array: jax.Array, parts: int) -> bool:
    """Return whether each device holds only its own part of an array."""
    shards = array.addressable_shards
    indices = {str(shard.index) for shard in shards}
    return len(indices) == len(shards) == parts and all(s.data.size * parts == array.size for s in shards)


def forks_of(engine: Engine) -> list[list[int]]:
    """Return the tokens of two completions of one prompt, which copy blocks."""
    params = jattn.serving.SamplingParams(n=2, temperature=0.8, seed=0, max_tokens=12)
    (result,) = engine.generate(PROMPTS[1:2], params)
    return [completion.token_ids for completion in result.outputs]


class SingleDeviceResults(NamedTuple):
    """Results of one device.

    Attributes:
        tokens: Tokens of each prompt.
        forks: Result of `forks_of`.
        memory: Memory statistics of each bucket's executable.
    """

    tokens: list[list[int]]
    forks: list[list[int]]
    memory: dict


def tokens_of(engine: Engine) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(PROMPTS, max_tokens=12)]


def alone_of(folder: pathlib.Path) -> SingleDeviceResults:
    engine = Engine(load(folder, progress=False), **SIZES)
    engine.precompile(progress=False)
    memory = {bucket: step.memory_analysis() for bucket, step in engine.graphs.executables.items()}
    return SingleDeviceResults(tokens_of(engine), forks_of(engine), memory)


def check_engine(folder: pathlib.Path, tp: int, alone: SingleDeviceResults) -> None:
    """Check one executable per bucket, equal tokens, and that nothing large is replicated or exchanged."""
    model = load(folder, mesh=jattn.parallel.make_mesh(tp=tp), progress=False)
    check_parameters(model, tp)
    engine = Engine(model, **SIZES)
    engine.precompile(progress=False)
    num_compiles = engine.stats.num_compiles
    assert engine.graphs.num_compiles == len(engine.graphs.buckets)
    uploads = count_host_transfers(engine)
    with record_compilations() as compiles:
        assert tokens_of(engine) == alone.tokens
    assert not compiles
    assert forks_of(engine) == alone.forks
    assert set(uploads) == {1}, uploads  # array of the host's a step
    check_new_weights(engine, alone.tokens)
    assert engine.stats.num_compiles == num_compiles
    params = sum(array.nbytes for array in jax.tree.leaves(jax.device_get(engine._runner.weights.state)))
    caches = sum(array.nbytes for array in jax.tree.leaves(jax.device_get(engine._runner._caches)))
    for bucket, watched in engine.graphs.executables.items():
        executable = watched.args[0]
        check_executable(executable, bucket, model.config, (params, caches), tp, alone.memory[bucket])
    print(f"tp {tp}: {num_compiles} executables, {params} and {caches} bytes")


def check_decode_loop(folder: pathlib.Path, tp: int) -> None:
    """Check that `decode_loop` on a mesh gives one device's tokens and keeps its caches sharded."""

    def loop(mesh: Any) -> DecodeLoopOutput:
        model = load(folder, mesh=mesh, progress=False)
        table = np.arange(1, 9).reshape(2, 4)
        metadata = jattn.build_batch_metadata([1, 1], [5, 9], table, bucket=jattn.Bucket(max_decodes=2))

        def step(model: Decoder, caches: Any, metadata: Any, tokens: Any) -> tuple[Any, Any]:
            hidden, caches = model(tokens, caches, metadata)
            return model.logits(hidden), caches

        greedy = lambda logits, index: logits.argmax(axis=-1)
        caches, tokens = model.create_caches(9), np.asarray([3, 4], np.int32)
        return decode_loop(step, model, caches, metadata, tokens, num_steps=12, sample=greedy)

    expected, sharded = loop(None), loop(jattn.parallel.make_mesh(tp=tp))
    np.testing.assert_array_equal(sharded.tokens, expected.tokens)
    assert len(np.unique(expected.tokens)) > 2
    assert all(is_cut(array, tp) for cache in sharded.caches for array in (cache.k, cache.v))
    print(f"decode_loop on {tp}")


def count_host_transfers(engine: Engine) -> list[int]:
    """Return a list of the number of host arrays that each later step transfers."""
    uploads: list[int] = []

    def watched(executable: Any, *arguments: Any) -> Any:
        uploads.append(sum(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arguments)))
        return executable(*arguments)

    ready = engine.graphs._executables.ready
    for bucket, executable in engine.graphs.executables.items():
        ready[bucket] = functools.partial(watched, executable)
    return uploads


def check_new_weights(engine: Engine, expected: list[list[int]]) -> None:
    """Check that updated weights from the host keep their sharding."""
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(engine.model)))
    engine.update_weights(jax.tree.map(np.zeros_like, state))
    assert {token for tokens in tokens_of(engine) for token in tokens} == {0}
    engine.update_weights(state)
    assert tokens_of(engine) == expected


def check_drafts(folder: pathlib.Path, expected: list[list[int]]) -> None:
    """Check that a draft model on the model's mesh changes no tokens."""
    model = load(folder, mesh=jattn.parallel.make_mesh(tp=2), progress=False)
    engine = Engine(model, **SIZES, speculative=str(folder), num_speculative_tokens=2)
    engine._speculation._draft_cost = 0.0  # a draft model as large as the model would never be used
    assert tokens_of(engine) == expected
    assert engine.stats.num_accepted_tokens > 0
    print(f"drafts: {engine.stats.num_accepted_tokens} accepted")


# Other engine features; each must give one device's tokens. `check_replicas` checks those of OF_REPLICAS.
FEATURES = {
    "fp8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "int8 cache, scales per token and head": {"kv_cache_dtype": "int8_token_head"},
    "int8 cache, scales per channel": {"kv_cache_dtype": "int8_static_v"},
    "cascades": {"cascade_attention": True, "block_size": 8},
    "batch_invariant": {"batch_invariant": True},
}


def check_logprobs_and_saved_files(folder: pathlib.Path) -> None:
    """Check that log-probabilities, also of prompts, and saved files equal one device's."""
    model = load(folder, mesh=jattn.parallel.make_mesh(tp=4), progress=False)
    save(model, folder / "saved")
    stored = [(directory / "model.safetensors").read_bytes() for directory in (folder, folder / "saved")]
    assert stored[0] == stored[1]
    params = jattn.serving.SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2)
    logprobs = []
    for decoder in (model, load(folder, progress=False)):
        (result,) = Engine(decoder, **SIZES).generate(PROMPTS[1:2], params)
        position_logprobs = [table for table in (*result.prompt_logprobs, *result.logprobs) if table]
        logprobs.append(
            [
                sorted((token, logprob.logprob) for token, logprob in table.items())
                for table in position_logprobs
            ]
        )
    np.testing.assert_allclose(
        *(np.concatenate(position_logprobs) for position_logprobs in logprobs), atol=2e-5
    )
    print("saved and scored")


def check_steps_without_caches(folder: pathlib.Path) -> None:
    """Check that hidden states without a cache and block table equal one device's, also of empty steps."""
    meshes = (None, jattn.parallel.make_mesh(tp=4), jattn.parallel.make_mesh(tp=2, cp=2))
    for lens in ([9, 5], []):
        ids, metadata = np.arange(sum(lens)), jattn.build_batch_metadata(lens, lens, None)
        expected, *meshes_hidden = (
            load(folder, mesh=mesh, progress=False)(ids, None, metadata)[0] for mesh in meshes
        )
        for actual in meshes_hidden:
            np.testing.assert_allclose(actual, expected, atol=2e-5)
    print("without caches")


def check_feature(
    folder: pathlib.Path, name: str, *, tp: int = 2, calibration: dict[str, Any] | None = None
) -> None:
    found, scales = [], []
    for mesh in (None, jattn.parallel.make_mesh(tp=tp)):
        model = load(folder, mesh=mesh, progress=False)
        if FEATURES[name].get("kv_cache_dtype") in ("fp8_e4m3", "int8_static_v"):  # static scales
            load_options = {"quantization": FEATURES[name]["kv_cache_dtype"], **(calibration or {})}
            model.kv_scales = jattn.calibrate(model, PROMPTS, **load_options)
            scales.append(jax.tree.map(np.shape, model.kv_scales.layers))
        engine = Engine(model, **SIZES | FEATURES[name])
        results = engine.generate([PROMPTS[2] + prompt for prompt in PROMPTS], max_tokens=12)
        found.append([result.token_ids for result in results])
        assert (engine.stats.num_cascade_steps > 0) == (name == "cascades")
        assert all(
            is_cut(leaf, tp) == (mesh is not None)
            for leaf in jax.tree.leaves(engine._runner._caches)
            if leaf.ndim
        )
    assert found[0] == found[1], (name, found)
    assert scales[:1] == scales[1:], scales
    print(f"{name} on {tp}")


# Features of `FEATURES`, and the options that `calibrate` needs besides.
OF_REPLICAS = {"fp8 cache": {"per_head": True}, "int8 cache, scales per channel": {}, "cascades": None}


def check_replicas(folder: pathlib.Path) -> None:
    """Check replicated KV heads: two of four devices share a head, and a padded vocabulary of 384 yields
    322 tokens only.
    """
    config = {"num_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 322}
    save(one_layer_model(**config), folder)
    alone, mesh = alone_of(folder), jattn.parallel.make_mesh(tp=4)
    model = load(folder, mesh=mesh, progress=False)
    check_parameters(model, 4)
    (kernel, embedding) = (model.layers[0].self_attn.qkv_proj.kernel, model.embed_tokens.embedding)
    assert (kernel.shape, embedding.shape) == ((96, 4, 4, 32), (512, 96))
    assert not np.asarray(embedding)[322:].any()
    assert model.logits(np.ones((1, 96), np.float32)).shape == (1, 322)
    engine = Engine(model, **SIZES)
    assert tokens_of(engine) == alone.tokens
    assert forks_of(engine) == alone.forks
    check_replicas_take_new_weights(engine, folder, alone.tokens)
    per_block = model.cache_specs(1)[0].bytes_per_block  # of all devices
    assert per_block == 2 * load(folder, progress=False).cache_specs(1)[0].bytes_per_block
    device_bytes = sum(
        array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(engine._runner._caches)
    )
    sized = Engine(model, **SIZES | {"num_blocks": None}, cache_bytes=device_bytes)
    assert sized.stats.num_blocks == engine.stats.num_blocks
    check_logprobs_and_saved_files(folder)
    for feature, feature_options in OF_REPLICAS.items():
        check_feature(folder, feature, tp=4, calibration=feature_options)


def check_replicas_take_new_weights(engine: Engine, folder: pathlib.Path, expected: list[list[int]]) -> None:
    """Check that updates accept weights as one device has them and as the mesh has them."""
    for updated_model in (load(folder, progress=False), load(folder, mesh=engine.model.mesh, progress=False)):
        state = nnx.state(updated_model)
        engine.update_weights(jax.tree.map(lambda array: np.zeros_like(array), state))
        assert {token for tokens in tokens_of(engine) for token in tokens} == {0}
        engine.update_weights(jax.tree.map(np.asarray, nnx.to_pure_dict(state)))
        assert tokens_of(engine) == expected
    print("new weights of replicas")


def check_masks() -> None:
    """Check that per-head masks use global head numbers, also with replicated KV heads."""
    tokens = 48
    ids = np.arange(1, tokens + 1, dtype=np.int32)
    metadata = jattn.build_batch_metadata([tokens], [tokens], np.arange(1, 4)[None])
    blocks = np.random.default_rng(0).random((6, 6, 6)) < 0.5
    masks = {
        "blocks": jattn.masks.BlockMask(blocks=blocks | np.eye(6, dtype=bool), block_q=8, block_kv=8),
        "strides": jattn.LocalStrided(block_size=4, local_blocks=1, vert_stride=4),
        "strides by kv heads": jattn.LocalStrided(
            block_size=4, local_blocks=1, vert_stride=4, homo_head_group=True
        ),
        "some heads": jattn.masks.OnlyHeads((0, 4)) | jattn.masks.Window(left=3),
    }

    @jax.jit
    def logits(model, caches, mask):
        plan = model.plan(metadata, caches, mask=mask)
        return model.logits(model(ids, caches, metadata, plan=plan)[0])

    results = []
    with tempfile.TemporaryDirectory() as folder:
        save(one_layer_model(), folder)  # 6 query heads, 2 KV heads
        for mesh in (None, *(jattn.parallel.make_mesh(tp=tp) for tp in (2, 6))):
            model = load(folder, mesh=mesh, progress=False)
            caches = model.create_caches(4)
            if mesh is None:
                plain = np.asarray(logits(model, caches, None))
            results.append([np.asarray(logits(model, caches, mask)) for mask in masks.values()])
    for name, expected, *actual in zip(masks, *results, strict=True):
        assert np.abs(expected - plain).max() > 1e-2, name
        for result in actual:
            np.testing.assert_allclose(result, expected, atol=2e-5, err_msg=name)
        print(f"masked: {name}")


def check_patterns() -> None:
    """Check Phi-3-small's sparse layers, whose pattern differs per device, before dense layers."""
    hf = read_config(GOLDEN / "hf" / "phi3small").to_hf() | {
        "num_hidden_layers": 2,
        "blocksparse_vert_stride": 4,
        "eos_token_id": None,
    }
    model = Decoder(DecoderConfig.from_hf(hf), rngs=nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, 300, 100).tolist()
    with tempfile.TemporaryDirectory() as name:
        save(model, name)
        results = []
        for mesh in (None, jattn.parallel.make_mesh(tp=2)):
            engine = Engine(load(name, mesh=mesh, progress=False), **SIZES)
            results.append(scores_of(engine, prompt))
    np.testing.assert_allclose(results[1], results[0], atol=2e-5)
    print("patterns")


def scores_of(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Return the largest log-probability at each position of a prompt and of some new tokens."""
    params = jattn.serving.SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    (result,) = engine.generate([prompt], params)
    position_logprobs = [table for table in (*result.prompt_logprobs, *result.logprobs) if table]
    return np.array([max(logprob.logprob for logprob in table.values()) for table in position_logprobs])


def check_training() -> None:
    """Check that gradients of all parameters equal one device's, for a Llama and for a norm over all
    heads.
    """
    with tempfile.TemporaryDirectory() as name:
        check_gradients(GOLDEN / "hf" / "olmo2", tp=4)
        for kv_heads, sizes in ((4, {"tp": 2}), (2, {"tp": 4}), (1, {"tp": 2, "cp": 2})):
            save(one_layer_model(num_attention_heads=8, num_key_value_heads=kv_heads), name)
            check_gradients(name, **sizes)


def check_gradients(folder: str | pathlib.Path, **sizes: int) -> None:
    """Check gradients of a loss over two documents; each copy of a KV head has the head's gradient."""
    ids = np.random.default_rng(0).integers(0, 97, 24).astype(np.int32)
    metadata = jattn.build_batch_metadata([16, 8], [16, 8], None)

    @nnx.jit
    @nnx.value_and_grad
    def loss_of(model):
        hidden, _ = model(ids, None, metadata)
        logs = jax.nn.log_softmax(model.logits(hidden))
        return -jax.numpy.take_along_axis(logs[:-1], ids[1:, None], axis=-1).mean()

    meshes = (None, jattn.parallel.make_mesh(**sizes))
    models = [load(folder, mesh=mesh, progress=False) for mesh in meshes]
    (loss, expected), (loss_on_mesh, actual) = map(loss_of, models)
    np.testing.assert_allclose(loss_on_mesh, loss, rtol=1e-6)
    for (path, expected_grad), (_, actual_grad) in zip(
        nnx.to_flat_state(expected), nnx.to_flat_state(actual), strict=True
    ):
        expected_grad, actual_grad = (
            pad_to_mesh(models[1].config, path, np.asarray(expected_grad.get_value())),
            actual_grad.get_value(),
        )
        assert "cp" in sizes or is_cut(actual_grad, sizes["tp"]) == (actual_grad.ndim > 1), path
        least = 1e-6 + 1e-5 * np.abs(expected_grad).max()
        np.testing.assert_allclose(actual_grad, expected_grad, rtol=1e-4, atol=least, err_msg=str(path))
    print(f"trained: a loss of {loss:.3f}")


def check_parameters(model, tp: int) -> None:
    """Check that all parameters except norms are sharded."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        array = variable.get_value()
        assert is_cut(array, tp) == (array.ndim > 1), (path, array.sharding)


def check_executable(executable, bucket, config, sizes: tuple[int, int], tp: int, alone) -> None:
    """Check the collectives: two all-reduces per layer and one of the embedding, and no all-gather."""
    collectives = EXCHANGES.findall(executable.as_text())
    kinds = [kind for _, kind in collectives]
    assert kinds.count("all-reduce") == 1 + 2 * config.num_hidden_layers, collectives
    assert kinds.count("all-reduce") == len(kinds), collectives
    memory, (params, caches) = executable.memory_analysis(), sizes
    most = (params + caches) / tp
    assert memory.argument_size_in_bytes < most + METADATA, (bucket, memory, most)
    assert memory.alias_size_in_bytes >= caches // tp, (bucket, memory, caches)
    assert memory.temp_size_in_bytes < 1.05 * alone.temp_size_in_bytes / tp + METADATA, (bucket, memory)


def run(check: str) -> None:
    if check in ("families", "other_families"):
        for path in sorted((GOLDEN / "hf").glob("*/expected.npz")):
            name = path.parent.name
            heads = read_config(path.parent).num_attention_heads
            # A device a query head: kv heads are held by several, and 160 or 320 tokens by 3 or 6 devices.
            sizes = {2} if name in TWO_ONLY else {2, heads}
            for tp in sizes:
                is_often = name in OFTEN and tp == 2
                if heads % tp == 0 and is_often == (check == "families"):
                    check_family(name, tp)
        return
    if check == "masks":
        check_masks()
        check_patterns()
        return
    if check == "training":
        check_training()
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        num_layers = 1 if check == "features" else 2
        save(one_layer_model(num_layers=num_layers, num_attention_heads=8, num_key_value_heads=4), folder)
        if check == "replicas":
            check_replicas(folder)
            return
        if check == "features":
            for feature in sorted(FEATURES.keys() - OF_REPLICAS.keys()):
                check_feature(folder, feature)
            check_logprobs_and_saved_files(folder)
            check_steps_without_caches(folder)
            check_decode_loop(folder, 2)
            return
        alone = alone_of(folder)
        for tp in (2, 4):
            check_engine(folder, tp, alone)
        check_drafts(folder, alone.tokens)
        command = ["doctor", "--model", str(folder), "--tensor-parallel-size", "4", "--num-blocks", "9"]
        assert command_line(command) == 0


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(name)
