"""Run a mixture-of-experts model in transformers: random weights, logits and times, in a process without JAX.

Usage: `python -m benchmarks.kernels.transformers_process NAME DIR`. The process writes a checkpoint,
    `expected.npz`
and `times.json` into the directory.
"""

import collections
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

COMMON = {"num_hidden_layers": 2, "vocab_size": 32768, "max_position_embeddings": 32768}
CONFIGS = {
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
    },
}
NUM_CHECKED = 256  # tokens of the prompt whose logits are compared
BATCH, CONTEXT, PROMPT = 64, 1024, 8192
EXPERT_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")  # the last one copies the experts of every row


def main(name: str, directory: pathlib.Path, *, device: str = "cuda", **overrides: Any) -> None:
    """Write the checkpoint, the expected logits and the times.

    Args:
        name: Name of a model in CONFIGS.
        directory: Directory of the files.
        device: torch device.
        **overrides: Fields of the config to replace, to test the script without a GPU.
    """
    sizes = {**COMMON, **CONFIGS[name], **overrides}
    config = transformers.AutoConfig.for_model(**sizes, dtype="bfloat16", tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                is_norm = parameter.ndim == 1 and key.endswith("norm.weight")
                is_embedding = "embed_tokens" in key
                parameter.normal_(float(is_norm), 1.0 if is_embedding else 0.02)
    model.save_pretrained(directory)
    np.savez(directory / "expected.npz", **logits(model, device))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    rows = [row | versions for row in (*layer_times(model, device), *step_times(model, device))]
    (directory / "times.json").write_text(json.dumps(rows))


@torch.no_grad()
def logits(model: Any, device: str) -> dict[str, np.ndarray]:
    """Return a prompt and its logits, in bfloat16 and in float32 with the same weights."""
    tokens = torch.randint(0, model.config.vocab_size, (1, NUM_CHECKED), device=device)
    bf16_logits = model(tokens).logits[0].float().cpu().numpy()
    model.float()
    model.set_experts_implementation("eager")
    float32_logits = model(tokens).logits[0].cpu().numpy()
    model.to(torch.bfloat16)
    return {"tokens": tokens[0].cpu().numpy(), "bf16": bf16_logits, "f32": float32_logits}


def layer_times(model: Any, device: str) -> list[dict[str, Any]]:
    """Return rows of a layer's router and experts, by number of tokens and implementation."""
    layer, width = model.model.layers[0].mlp, model.config.hidden_size
    rows = []
    for tokens in (BATCH, PROMPT):
        x = torch.randn((1, tokens, width), device=device, dtype=torch.bfloat16)
        for implementation in EXPERT_IMPLEMENTATIONS[: 2 if tokens == PROMPT else 3]:
            case = {"case": "layer", "tokens": tokens, "way": implementation}
            rows.append(case | measure(model, implementation, functools.partial(layer, x)))
    return rows


def step_times(model: Any, device: str) -> list[dict[str, Any]]:
    """Return rows of a decode step of 64 requests and a prompt of 8k tokens, by implementation."""
    rows = []
    prompt, next_ids = (
        torch.randint(0, model.config.vocab_size, shape, device=device) for shape in ((1, PROMPT), (BATCH, 1))
    )
    for implementation in EXPERT_IMPLEMENTATIONS:
        cache = random_cache(model, device)
        decode = functools.partial(model, next_ids, past_key_values=cache, logits_to_keep=1)
        case = {"case": "decode", "tokens": BATCH, "way": implementation}
        rows.append(case | measure(model, implementation, decode))
    for implementation in EXPERT_IMPLEMENTATIONS[:2]:
        prefill = functools.partial(model, prompt, use_cache=True, logits_to_keep=1)
        case = {"case": "prefill", "tokens": PROMPT, "way": implementation}
        rows.append(case | measure(model, implementation, prefill))
    return rows


def random_cache(model: Any, device: str) -> Any:
    """Create a cache with random keys and values of 64 requests."""
    config = model.config
    cache = transformers.DynamicCache(config=config)
    shape = (BATCH, config.num_key_value_heads, CONTEXT - 1, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


@torch.no_grad()
def measure(model: Any, implementation: str, call: Callable[[], Any], rounds: int = 10) -> dict[str, Any]:
    """Measure a call with an implementation of the experts.

    Args:
        model: Model that the call runs.
        implementation: transformers' name of the implementation.
        call: Function to measure.
        rounds: Number of timed calls.

    Returns:
        Microseconds per call in flight and the sum of its kernel times, or the error message.
    """
    is_cuda = next(model.parameters()).is_cuda
    wait = torch.cuda.synchronize if is_cuda else lambda: None
    try:
        model.set_experts_implementation(implementation)
        for _ in range(3):
            call()
        wait()
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        wait()
        in_flight = 1e6 * (time.perf_counter() - start) / rounds
        return {"in_flight_us": in_flight, **(kernel_times(call) if is_cuda else {})}
    except Exception as error:  # the row records the error
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def kernel_times(call: Callable[[], Any], rounds: int = 3) -> dict[str, Any]:
    """Return the sum of a call's kernel times in microseconds, and the four longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = collections.defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]] += event.device_time_total / rounds
    longest = sorted(times.items(), key=lambda item: -item[1])[:4]
    return {"kernel_sum_us": sum(times.values()), "most_us": {name: round(us, 1) for name, us in longest}}


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
