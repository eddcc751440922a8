"""Plausible mistakes raise errors that contain the argument, the rule and the value."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
WANT = {
    # PagedAttention
    "m.attend(x=jnp.ones((2, 4, 16)))": r"x must have shape \(8, 16\) .*tokens axis.*\(2, 4, 16\)",
    "m.attend(x=jnp.ones((7, 16)))": r"x must have shape \(8, 16\) .*, got \(7, 16\)\.",
    "m.attend(x=jnp.ones((8, 17)))": r"x must have shape \(8, 16\) .*, got \(8, 17\)\.",
    "m.attend(metadata=jattn.plan(m.metadata, m.spec))": r"metadata must be a BatchMetadata .*, got \w*Plan",
    "m.attend(metadata=None)": r"metadata must be a BatchMetadata .*, got NoneType\.",
    "m.attend(plan=m.metadata)": r"plan must be a Plan \(jattn.plan\) or None, got BatchMetadata\.",
    "m.attend(plan=True)": r"plan must be a Plan \(jattn.plan\) or None, got bool\.",
    "m.attend(cache=(1, 2))": r"cache must be a PagedCache or None, got tuple\.",
    "m.attend(positions=jnp.arange(2))": r"positions must have shape \(8,\) .*, got \(2,\)\.",
    "jattn.PagedAttention(16, {'num_q_heads': 2}, rngs=nnx.Rngs(0))": r"spec must be a .*, got dict\.",
    "jattn.PagedAttention(16.0, m.spec, rngs=nnx.Rngs(0))": r"hidden_size must be an int, got 16\.0\.",
    "jattn.PagedAttention(0, m.spec, rngs=nnx.Rngs(0))": r"hidden_size must be positive, got 0\.",
    # attend, attention, plan, merge_attn_states
    "jattn.attend(m.rows, m.cache, m.decodes, m.spec, implementation=3)": r"implementation must be .*, got 3",
    "jattn.attend(m.rows, m.cache, m.decodes, m.spec, return_lse='no')": r"return_lse must be .*, got 'no'",
    "jattn.attention(m.rows, m.rows, m.rows, implementation=3)": r"implementation must be one of .*, got 3",
    "jattn.attention(m.rows, m.rows, m.rows, return_lse='no')": r"return_lse must be True or False, got 'no'",
    "jattn.attention_fn(m.rows, m.rows, m.rows, spec=3)": r"spec must be a AttentionSpec .*, got int: 3",
    "jattn.cascade_attend(m.rows, m.cache, m.decodes, m.spec)": r"metadata must be a Cascade.*, got Batch",
    "jattn.plan(m.decodes, m.cache_spec, m.spec)": r"specs must be a AttentionSpec .*, got CacheSpec",
    "jattn.plan(m.decodes, m.spec, m.cache_spec, query_dtype='f5')": r"query_dtype must be a dtype, got 'f5'",
    "jattn.plan(m.decodes, m.spec, query_dtype=jnp.int32)": r"query_dtype must be a float type, got int32",
    "jattn.merge_attn_states(m.rows, None, m.rows, None)": r"prefix_lse must be an array, got NoneType",
    "jattn.PagedAttention(16, m.spec, rngs=3)": r"rngs must be a Rngs \(nnx.Rngs\(0\)\), got int: 3\.",
    # caches and metadata
    "jattn.write_kv(m.cache, m.row, m.row, np.array([2**32]))": r"slot_mapping must hold int32s, got 4294",
    "jattn.write_kv(m.cache, m.rows, m.rows, np.arange(2))": r"key must have shape \(1, 8\) .the cache's kv_",
    "jattn.blocks_of(m.cache, [1])": r"ids must be an array of block numbers, got list",
    "jattn.swap_blocks(m.cache, m.cache.k, [(1, 2)])": r"target must be a PagedCache, got ArrayImpl",
    "jattn.advance(m.cache)": r"metadata must be a BatchMetadata .*, got PagedCache",
    "jattn.pad_to_bucket(m.bucket, m.decodes)": r"metadata must be a BatchMetadata .*, got Bucket",
    "jattn.build_cascade_metadata(m.spec, 16)": r"metadata must be a BatchMetadata .*, got AttentionSpec",
    "jattn.pack_tokens([1, 2], m.bucket)": r"tokens\[0\] must be a list of token ids, got 1",
    "jattn.pack_tokens([[1]], 8)": r"bucket must be a Bucket .*, got int: 8",
    "jattn.pack_tokens([[1]], m.bucket, pad='x')": r"pad must be an int, got 'x'",
    "jattn.row_indices([1.5], m.bucket)": r"query_lens must hold ints, got float64",
    "jattn.row_indices([1], 8)": r"bucket must be a Bucket .*, got int: 8",
    "jattn.default_buckets(4, max_blocks=4, prefill_tokens=64)": r"prefill_tokens must be a list .*, got 64",
    "jattn.default_buckets(4.5, max_blocks=4)": r"max_num_seqs must be an int, got 4\.5",
    "m.loop(step=None)": r"step must be a function, got None",
    "m.loop(sample=3)": r"sample must be a function, got 3",
    "m.loop(metadata=m.cache)": r"metadata must be a BatchMetadata .*, got PagedCache",
    # masks and vLLM's helpers
    "jattn.masks.And(jattn.masks.Causal())": r"And.masks must be a tuple of masks .*, got Causal\(\)",
    "jattn.masks.Or((3,))": r"Or.masks must be a tuple of masks \(a & b, a \| b\), got \(3,\)",
    "jattn.masks.Not((jattn.masks.Causal(),) * 2)": r"Not.masks must be a tuple of one mask .*, got \(Causal",
    "jattn.vllm.slice_query_start_locs([0, 1], 'ab')": r"request_slice must be a slice .*, got 'ab'",
    "jattn.vllm.compute_slot_mapping([[1]], [0], [0, 1], 4)": r"positions must have shape \(1,\) .*got",
    "jattn.vllm.compute_slot_mapping([[1]], [0], [0], 4.0)": r"block_size must be an int, got 4\.0",
    "jattn.vllm.use_cascade_attention(512, [1] * 8, 8, 3, *[False] * 3, 1)": r"num_query_heads must be a mul",
    "jattn.vllm.prefill_block_pattern(jattn.LocalStrided(), 8, 3, 2)": r"num_q_heads must be a .*, got 8",
    "jattn.sparsity.x_attention(m.rows, m.rows, mass='a')": r"mass must be a number, got 'a'",
    "jattn.LocalStrided(homo_head='no')": r"homo_head must be True or False, got 'no'",
    "jattn.vllm.get_head_sliding_step(0, 8)": r"n_heads must be positive, got 0",
    "jattn.vllm.make_graph_keys('FULL', [1], 1)": r"mode must be a CUDAGraphMode .*, got str: 'FULL'",
    "jattn.vllm.resolve_cudagraph_mode('FULL', 0)": r"mode must be a CUDAGraphMode .*, got str: 'FULL'",
    "jattn.vllm.dispatch_cudagraph('FULL', 4)": r"keys must be a GraphKeys .*, got str: 'FULL'",
    "jattn.vllm.infer_global_hyperparameters([1])": r"per_layer_params must be a Mapping .*, got list: \[1\]",
    "jattn.vllm.reshape_and_cache(*[m.rows] * 5, 'auto')": r"k_scale must be .*kv_cache_dtype.*, got 'auto'",
    "jattn.vllm.split_prefill_and_decode([1, 2], [3], [1, 2, 3])": r"seq_lens must have one .* \(2\), got 1",
    "jattn.sparsity.block_means(m.rows, 4)": r"x must have shape \[batch, tokens, .*, got \(2, 2, 8\)",
    "jattn.sparsity.top_k_blocks([[1.0]], 1)": r"scores must be an array \[\*rows, blocks\], got a list",
    "jattn.sparsity.select_blocks(*[m.rows] * 4, num_selected=1, block_size=4)": r"bounds must be a KeyB",
    "jattn.sparsity.select_prefill_blocks(*[m.rows] * 4, mass=0.9)": r"metadata must be a BatchMetadata",
    # models
    "m.model(jnp.arange(8), m.cache, m.metadata)": r"caches must have one entry per layer \(1\), got one P",
    "m.model(m.metadata, None, jnp.arange(8))": r"metadata must be a BatchMetadata .*, got ArrayImpl",
    "m.model.plan(m.decodes, [m.cache] * 2)": r"caches must have one entry per layer \(1\), got 2",
    "jattn.models.load(GOLDEN / 'hf' / 'llama', dtype='f5')": r"dtype must be a dtype, got 'f5'",
    "jattn.models.load(GOLDEN / 'hf' / 'llama', dtype=jnp.int8)": r"dtype must be a float type, got int8",
    "jattn.models.save('DIR', m.model)": r"model must be a Decoder \(save\(.*, got str: 'DIR'",
    "jattn.calibrate(m.model, None)": r"prompts must be a list of prompts, got None",
    "jattn.calibrate(m.model, {'a': 1})": r"prompts must be a list of prompts, got \{'a': 1\}",
    "jattn.calibrate(m.model, ['a'], headroom='1')": r"headroom must be a number, got '1'",
    "jattn.calibrate(m.model, ['a'], per_head='no')": r"per_head must be True or False, got 'no'",
    "jattn.calibrate(m.model, ['a'], quantization=['fp8'])": r"quantization must be a str .*, got list",
    "jattn.calibrate('DIR', ['a'])": r"model must be a Module .*, got str: 'DIR'",
    # DecodeGraphs
    "jattn.DecodeGraphs(len, m.bucket)": r"buckets must be a list of Buckets \(one: \[bucket\]\), got Bucket",
    "jattn.DecodeGraphs(len, [(1, 2)])": r"buckets\[0\] must be a Bucket, got \(1, 2\)\.",
    "jattn.DecodeGraphs(m.model.config, [m.bucket])": r"step must be a function, got DecoderConfig",
    "jattn.DecodeGraphs(len, [m.bucket])({}, (), {})": r"metadata must be a BatchMetadata, got dict\.",
    # Engine
    "Engine(None)": r"model must be a jattn.models.Decoder or a Hugging Face folder, got None\.",
    "Engine(type('M', (), {'config': 0})())": r"model must have .*missing: tokenizer, .*, got a M\.",
    "Engine(type('M', (), dict.fromkeys(m.members))())": r"model must be an nnx.Module, got a M\.",
    "Engine({'a': 1})": r"model must be a jattn.models.Decoder or .*, got \{'a': 1\}\.",
    "Engine(m.model, buckets=[8])": r"buckets\[0\] must be a Bucket, got 8\.",
    "Engine(m.model, kv_cache_dtype='int4')": r"kv_cache_dtype must be a float dtype .*'fp8', .*, got 'int4'",
    "Engine(m.model, kv_cache_dtype=jnp.int8)": r"kv_cache_dtype must be .* one of 'auto', .* got .*int8",
    "Engine(m.model, kv_cache_dtype=None)": r"kv_cache_dtype must be .*, got None\.",
    "Engine(m.model, cache_dir=3)": r"cache_dir must be a str or PathLike \(a folder, or None\), got int: 3",
    "jattn.serving.Scheduler(3)": r"block_manager must be a BlockManager .*, got int: 3\.",
    # generate
    "ask('text')": r"prompts must be a list of prompts, got 'text'\.",
    "ask(None)": r"prompts must be a list of prompts, got None\.",
    "ask({'prompt': 'a'})": r"prompts must be a list of prompts, got \{'prompt': 'a'\}\.",
    "ask([1, 2])": r"prompts\[0\] must be text or a list of token ids, got 1\.",
    "ask([None])": r"prompts\[0\] must be text or a list of token ids, got None\.",
    "ask([[[1]]])": r"prompts\[0\] must be text or a list of token ids, got \[\[1\]\]\.",
    "ask([[1, [2, 3]]])": r"prompts\[0\] must be text or a list of token ids, got \[1, \[2, 3\]\]\.",
    "ask([[1.5]])": r"prompts\[0\] must be text or a list of token ids, got \[1\.5\]\.",
    "ask(['a'], [])": r"sampling_params must have one entry per prompt \(1\), got 0\.",
    "ask(['a'], on_token=True)": r"on_token must be a function or None, got True\.",
    "ask(['a'], SamplingParams(temperature=1, n=2), on_token=print)": r"n must be 1 with on_token, got 2\.",
    "ask(['a'], SamplingParams(stop_token_ids=[320]))": r"stop_token_ids must be in .* 320\), got \[320\]",
    "ask(['a'], SamplingParams(logit_bias={-1: 2}))": r"logit_bias must be in the voc.*, got \[-1\]\.",
    # add_request and abort
    "add('a', {'max_tokens': 3})": r"params must be a SamplingParams \(for .*\), got dict: \{'max_tok",
    "add('', None)": r"prompt is empty\.",
    "add('a\\udcff', None)": r"prompt must be valid Unicode text, got 'a\\udcff'\.",
    "add('a', request_id=1.5)": r"request_id must be a int or str or None .*, got float: 1\.5\.",
    "add('a' * 144, SamplingParams(max_tokens=2))": r"prompt has 144 tokens and max_tokens=2, but ",
    "add('a' * 129, SamplingParams(max_tokens=None))": r"prompt has 129 tokens, but .* only 128",
    "m.engine.abort('nobody')": r"Request 'nobody' is unknown or has finished\.",
    "(add('a', request_id='x'), add('b', request_id='x'))": r"request_id 'x' is already in use\.",
    "m.engine.abort([1])": r"request_id must be a int or str \(the identifier .*\), got list: \[1\]\.",
    "Engine(m.model, max_model_len=513)": r"max_model_len=513 exceeds the model's maximum of 512\.",
    "Engine(m.model, max_model_len=0)": r"max_model_len must be positive, got 0\.",
    # SamplingParams
    "SamplingParams(n=0)": r"n must be in \[1, 16384\], got 0\.",
    "SamplingParams(stop=['a', ''])": r"stop must hold no empty string, got \('a', ''\)\.",
    "SamplingParams(temperature=float('nan'))": r"temperature must be in \[0, 1e30\], got nan\.",
    "SamplingParams(repetition_penalty=0)": r"repetition_penalty must be in .*, got 0\.",
    "ask(['a'], 8)": r"sampling_params must be a SamplingParams .*use max_tokens=\), got int: 8",
    "ask(['a'], {'temperature': 1.0})": r"sampling_params must be a SamplingParams .*, got dict: \{'temp",
    "SamplingParams(max_tokens=0)": r"max_tokens must be positive, got 0\.",
    "SamplingParams(min_tokens=17)": r"min_tokens must be in \[0, max_tokens \(16\)\], got 17\.",
    "SamplingParams(min_tokens=-1, max_tokens=None)": r"min_tokens must be at least 0, got -1\.",
    "SamplingParams(n=2)": r"n must be 1 with temperature 0, where all completions are the same, got 2\.",
    "SamplingParams(presence_penalty=3)": r"presence_penalty must be in \[-2, 2\] \(0 = off\), got 3\.",
    "SamplingParams(logit_bias={1: 101})": r"logit_bias\[1\] must be in \[-100, 100\], got 101\.",
    "SamplingParams(logprobs=21)": r"logprobs must be in \[0, 20\], got 21\.",
    "SamplingParams(prompt_logprobs=-1)": r"prompt_logprobs must be in \[0, 20\], got -1\.",
    "SamplingParams(repetition_penalty=1e39)": (
        r"repetition_penalty must be in \[1e-30, 1e30\] \(1 = off\), got 1e\+39\."
    ),
    "SamplingParams(repetition_penalty=1e-39)": r"repetition_penalty must be in .*, got 1e-39\.",
}


HINTS = {  # arguments of other libraries: TypeErrors
    "jattn.attend(m.rows, m.cache, m.decodes, m.spec, scale=1)": r"attend.* Use AttentionSpec\(scale=\)\.",
    "jattn.attend(m.rows, m.cache, m.decodes, m.spec, softcap=9)": r"attend.* AttentionSpec\(soft_cap=\)\.",
    "Engine(m.model, quantization='fp8')": r"weights is read from the checkpoint.* use kv_cache_dtype=\.",
    "Engine(m.model, gpu_memory_utilization=0.9)": r"Engine\(\) got .* Use cache_bytes= or num_blocks=\.",
    "Engine(m.model, tensor_parallel_size=2)": r"Load the model with mesh=jattn.parallel.make_mesh\(tp=\)\.",
    "Engine(m.model, enable_lora=True)": r"'enable_lora'. LoRA is not supported\.",
    "Engine(m.model, cache_size=2)": r"unexpected keyword argument 'cache_size'",
    "ask(['a'], temperature=0.5)": r"generate\(\) got .* Use .*SamplingParams\(temperature=\)\.",
    "ask(prompt_token_ids=[[1]])": r"Pass lists of token ids as prompts\.",
}


@pytest.fixture(scope="module")
def errors():
    """Return the error of each expression, in a process without the type checks."""
    command = [sys.executable, "-W", "error", "-m", "tests.serving.mistakes", *WANT, *HINTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip([*WANT, *HINTS], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("mistake", WANT)
def test_a_mistake_is_reported_by_argument_and_value(errors, mistake):
    assert re.match("ValueError: " + WANT[mistake], errors[mistake]), errors[mistake]


@pytest.mark.parametrize("mistake", HINTS)
def test_an_argument_of_another_library_is_reported_with_its_equivalent(errors, mistake):
    assert re.match(f"TypeError: .*{HINTS[mistake]}", errors[mistake]), errors[mistake]
