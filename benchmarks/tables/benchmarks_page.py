"""docs/benchmarks.md, generated from the raw rows: text, tables and the sentences that compare them."""

from benchmarks.tables import kernels, models
from benchmarks.tables.markdown import table

GLOSSARY = {
    "us": "Microseconds of device time: the sum of the kernel times of a call, without gaps between kernels.",
    "FA3": "FlashAttention-3 as shipped with vLLM 0.24.0, timed by CUDA graph replay in the same run, which includes gaps of 1 to 2 us.",
    "FlashInfer": "FlashInfer 0.6.12, timed in the same way: its default `fa2` in decode, its `fa3` in prefill.",
    "cuDNN": "Prefill: through torch, timed in the same way. Decode and training: through `jax.nn.dot_product_attention`, the sum of "
    "its kernels; decode reads a dense cache, the only kind that it supports.",
    "speedup": "The peer's time divided by jattn's time, both of one run on one machine; above 1, jattn is faster.",
    "read ceiling": "GB/s of summing 4 GiB in the same run.",
    "GB/s": "Bytes of keys, values, queries and outputs, each counted once, divided by the time.",
    "density": "Visible query-key pairs divided by causal pairs.",
    "of ideal": "Time of the dense kernel in the same run, times the density, divided by the time.",
    "d_64x4k": "Decode, 64 requests with 4,096 cached tokens each; 32 query heads, 8 kv heads, head_dim 128 (Llama 3 8B) unless the name differs.",
    "d_ragged64": "Decode, 64 requests of 64 to 16k tokens: many short, a few long.",
    "d_70b, d_mha, d_gptoss": "Query heads / kv heads / head_dim of 64/8/128, 32/32/128, 64/8/64.",
    "p_8x2k, p_ragged": "Prefill, 8 prompts of 2,048 tokens; 24 prompts of 32 to 4,096 tokens.",
    "p_chunk_4x2k_ctx16k": "Prefill, 4 chunks of 2,048 tokens after 14,336 cached tokens.",
    "p_d64, p_d192, p_d256": "Query heads / kv heads / head_dim of 64/8/64, 16/8/192, 16/8/256.",
    "in flight, synchronous": "Time per step if the next step is launched before this one ends; if the host waits for each step.",
    "command buffers": "Whether XLA launches the step as one CUDA graph.",
}
DATE_H200 = "nvidia-h200-2026-11"


def page() -> str:
    """Return docs/benchmarks.md."""
    glossary = table(
        ("term", "meaning"), [[f"`{term}`" if "_" in term else term, text] for term, text in GLOSSARY.items()]
    )
    parts = [
        "# Benchmarks\n",
        "This page is generated: `python -m benchmarks SUITE` measures and appends rows to\n"
        "[benchmarks/results](../benchmarks/results/README.md); `python -m benchmarks table` writes the page. A row is recorded only if its\n"
        "numerical check passed, and slower rows stay. Two GPUs of one model differ by several per cent, so compare only within a table.\n",
        "```sh\nmake bench                                    # every GPU suite except `tune`\n"
        "python -m benchmarks decode d_64x4k           # one case of one suite\n"
        "python -m benchmarks table                    # regenerate this page and the README's tables\n```\n",
        "## Terms and cases\n",
        glossary,
        *decode(),
        *prefill(),
        *gradients(),
        *other_architectures(),
        *sparse(),
        *quantized(),
        *serving(),
    ]
    return "\n".join(parts)


def decode() -> list[str]:
    """Return the section on decode."""
    return [
        "## Decode\n",
        "Decode with one new token per request, a bf16 cache and blocks of 16 (`python -m benchmarks decode`).\n",
        kernels.decode_table(f"decode-{DATE_H200}-25.jsonl", f"decode-peers-beside-{DATE_H200}-25.jsonl"),
        "This table shows decode over 8-bit caches with bf16 queries. The bytes include scales per token and head.\n",
        kernels.quantized_decode_table(
            f"decode-{DATE_H200}-21.jsonl", f"decode-fa3-beside-{DATE_H200}-21.jsonl"
        ),
    ]


def prefill() -> list[str]:
    """Return the section on prefill."""
    return [
        "## Prefill\n",
        "Causal attention in bf16 of prompts, and of chunks of prompts after cached tokens (`python -m benchmarks prefill`). `contiguous` keys\n"
        "are outside a cache; `blocks of 16` are in a paged cache. Times are those of the kernel. Over 8-bit caches they include `cache_read`\n"
        "if the step uses it. They exclude the schedule, which takes 7 to 14 us (24 to 35 us with splits) once per step for all layers.\n",
        kernels.prefill_table(f"prefill-{DATE_H200}-25.jsonl", f"prefill-peers-{DATE_H200}-25.jsonl"),
        "This run measures 8-bit caches, modifiers, and cases that the run above lacks:\n",
        kernels.prefill_table(f"prefill-{DATE_H200}-22.jsonl", f"prefill-peers-{DATE_H200}-22.jsonl"),
        "This table shows few queries after a long context, with blocks of 16. Times include combining the splits:\n",
        kernels.few_queries_table(
            f"prefill-heads-{DATE_H200}-25.jsonl", f"prefill-heads-peers-{DATE_H200}-25.jsonl"
        ),
        "The next tables show the same cases over 8-bit caches. Either the kernel dequantizes keys and values, or `cache_read` does so first:\n",
        kernels.quantized_prefill_table(f"prefill-narrow-{DATE_H200}-25.jsonl"),
        kernels.quantized_prefill_table("prefill-narrow-crossing-nvidia-h100-80gb-hbm3-2026-11-25.jsonl"),
    ]


def gradients() -> list[str]:
    """Return the section on training."""
    return [
        "## Gradients\n",
        "The backward pass with 32 query heads, 8 kv heads and head_dim 128 (unless the name says otherwise), causal, in bf16\n"
        "(`python -m benchmarks backward`). Times include what XLA computes around the kernels and exclude schedules and lists. TFLOP/s count\n"
        "visible pairs. The TFLOP/s of a mask divided by those of the plain case are therefore its share of the ideal.\n",
        kernels.gradients_table(f"backward-whole-{DATE_H200}-26.jsonl"),
        "A later run with masks only. In `selected_blocks` each query selects 16 blocks of 64 keys for all heads of a kv head, at random, as in\n"
        "native sparse attention; `t_16_heads` has 2 kv heads. For `t_16_heads_1x16k selected_blocks`, FlexAttention of torch 2.11 takes\n"
        "28,728 us forward and 30,393 us backward on the GPU on which jattn takes 1,935 us and 3,447 us\n"
        "([`backward-peers`, `forward-heads-as-rows`](../benchmarks/results/README.md)).\n",
        kernels.gradients_table(f"backward-masks-{DATE_H200}-30.jsonl"),
        "These rows are from an H100. The plain cases ran on one GPU of the machine, the others on its second GPU at the same time:\n",
        kernels.gradients_table("backward-later-nvidia-h100-80gb-hbm3-2026-11-25.jsonl"),
        "## Training a layer\n",
        "The tables compare Llama 3 8B's projections and attention with the same layer on `jax.nn`'s cuDNN attention. Each case runs forward\n"
        'and backward in one jit, in bf16 (`python -m benchmarks training`). For cuDNN, documents are padded to the longest. "Attention" is\n'
        "everything but the projections. The error is the largest of output and gradients, relative to XLA in float32.\n",
        kernels.training_table("training-8x2k-nvidia-h100-80gb-hbm3-2026-11-26.jsonl"),
        kernels.training_table("training-slashes-nvidia-h100-80gb-hbm3-2026-11-26.jsonl"),
        kernels.training_table(f"training-in-turn-{DATE_H200}-23.jsonl"),
    ]


def other_architectures() -> list[str]:
    """Return the section on kernels for other architectures than Hopper."""
    h100 = "nvidia-h100-80gb-hbm3-2026-11-27.jsonl"
    return [
        "## Kernels for other architectures\n",
        "Kernels have run on Hopper GPUs only. These tables compare Hopper's kernel (9.0) with those for older and for consumer GPUs, which\n"
        "[`pallas_kernels.target`](kernels.md#architectures) selects, on the same GPU: decode, prefill and gradients.\n",
        kernels.targets_table(f"decode-older-gpus-{DATE_H200}-27.jsonl"),
        kernels.targets_table(f"prefill-older-gpus-{h100}"),
        kernels.targets_table(f"backward-older-gpus-{h100}"),
    ]


def sparse() -> list[str]:
    """Return the section on sparse attention."""
    return [
        "## Sparse attention\n",
        "32 query heads, 8 kv heads, head_dim 128 (`python -m benchmarks sparse`). Times include building the lists and selecting blocks.\n\n"
        "- `blocks_128_16k`: prefill of one causal prompt of 16k tokens; each head has different random blocks of 128 x 128.\n"
        "  `blocks_128x16`: of 128 queries and 16 keys; `8_heads`: the query heads of each kv head share the blocks.\n"
        "- `local_strided`: Phi-3-small's pattern. `pooled`: `select_prefill_blocks` over random queries and keys.\n"
        "- `vertical_slash`: MInference's pattern with 1,000 columns (in runs of 100; `scattered`: isolated) and 6,096 slashes per head;\n"
        "  `gathered`: columns are gathered.\n"
        "- `*_64x32k`: decode of 64 requests with 32k tokens; each kv head (`by_head`: each query head) has different random blocks.\n"
        "- `quest`: decode of 8 requests with 128k tokens; a tenth of the blocks is selected in the same call.\n",
        kernels.sparse_table(f"sparse-{DATE_H200}-22.jsonl"),
        kernels.sparse_table("sparse-packed-heads-nvidia-h100-80gb-hbm3-2026-11-27.jsonl"),
        kernels.sparse_table("sparse-wide-blocks-nvidia-h100-80gb-hbm3-2026-11-28.jsonl"),
        kernels.sparse_table(f"sparse-vertical-slash-{DATE_H200}-29.jsonl"),
        kernels.sparse_table(f"sparse-{DATE_H200}-21.jsonl"),
        "vLLM 0.9.2 is the last release with block-sparse attention. The table compares jattn with its `paged_attention_v2` in decode and its\n"
        "Triton kernel in prefill:\n",
        kernels.sparse_peers_table(
            f"sparse-{DATE_H200}-21.jsonl", f"sparse-vllm-beside-{DATE_H200}-21.jsonl"
        ),
    ]


def quantized() -> list[str]:
    """Return the section on 8-bit caches."""
    return [
        "## 8-bit caches\n",
        "What each cache format costs the model in `examples/tiny_model` on sources it has not seen (`python -m benchmarks quantization`).\n"
        "Static scales come from `jattn.calibrate`. The heads of this model are 32 wide, so scales per token and head weigh four times as\n"
        "much as with 128.\n",
        models.quantization_table("quantization-cpu-2026-11-21.jsonl"),
        "This table shows the time of cache writes in us, with 8 kv heads of 128 and blocks of 16 (`python -m benchmarks write`). Numbers in\n"
        "parentheses are relative to 16 bits:\n",
        kernels.write_table(f"write-{DATE_H200}-21.jsonl"),
    ]


def serving() -> list[str]:
    """Return the sections on whole models."""
    return [
        "## Engine\n",
        "The model has 36 layers of Qwen3-8B's sizes and random bf16 weights. A step has at most 256 requests and 8,192 new tokens\n"
        "(`python -m benchmarks engine`).\n"
        '`decode_BxC` is a decode step of B requests with C tokens; "in completions" is the same from the difference of long and short\n'
        "completions. `nano_bench` is nano-vllm's benchmark: 256 requests of 100 to 1,024 tokens in and out.\n",
        models.engine_table(f"engine-{DATE_H200}-23.jsonl", f"engine-peer-{DATE_H200}-23.jsonl"),
        "Both engines run nano-vllm's benchmark with default options, one after the other on one GPU. `first` is the first run. `again` repeats\n"
        "the same prompts, with cached prefixes:\n",
        models.engine_table(
            f"engine-workload-{DATE_H200}-23.jsonl", f"engine-workload-peer-{DATE_H200}-23.jsonl"
        ),
        "These tables show the time until the engine is ready, and until all 30 executables exist. In the last row, the engine serves\n"
        "nano-vllm's requests from the moment that it is ready (`python -m benchmarks starts --first-minute`).\n"
        "The host of the second table is slower:\n",
        models.start_table("starts-nvidia-h100-80gb-hbm3-2026-11-27.jsonl"),
        models.start_table(f"starts-{DATE_H200}-29.jsonl"),
        "### Speculative decoding\n",
        "Prompt lookup proposes 7 tokens on a model with known continuations (`python -m benchmarks drafts`). The texts of `copying` repeat\n"
        "themselves. All drafts for the other texts are rejected.\n",
        models.speculative_table(f"drafts-{DATE_H200}-23.jsonl"),
        "### Cascade attention\n",
        "The requests of these decode steps share 8,192 tokens (`python -m benchmarks cascades`).\n",
        models.cascade_table(f"cascades-{DATE_H200}-23.jsonl"),
        models.cascade_table(f"cascades-by-splits-{DATE_H200}-25.jsonl"),
        "## Server\n",
        "The table compares `jattn serve` with the same engine called without a server (`python -m benchmarks serve`). Both get the same prompts\n"
        "(1,024 tokens in, 256 out) at the same Poisson arrival times for 8 seconds. The time to the first token is measured from the scheduled\n"
        'arrival. All times are medians. "at once" means 256 requests of 16 prompt tokens and 256 new tokens that arrive together. "engine\n'
        'again" repeats the run of the engine and shows the noise.\n',
        models.server_table(f"serve-sent-at-once-{DATE_H200}-24.jsonl"),
        "![times to the first token and between tokens by request rate](images/server.svg)\n",
        "## Decode graphs\n",
        "A decode step with a context of 1,024 is one executable (`python -m benchmarks graphs`). `chain` is 32 attention layers of Llama 3\n"
        "8B's sizes, `graphs` a step of `DecodeGraphs` with the sampler, and `loop` a step of `decode_loop`. The first number is the batch.\n",
        models.graphs_table(f"graphs-{DATE_H200}-21.jsonl"),
        "## Mixture of experts\n",
        "The table compares two layers with random weights with transformers 5.17 and torch 2.11, in the fastest of its implementations\n"
        "(`python -m benchmarks experts --beside-transformers`).\n",
        models.experts_table(f"experts-beside-transformers-{DATE_H200}-23.jsonl"),
    ]
