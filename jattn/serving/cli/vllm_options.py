"""Options of `vllm serve` that have another name here, or are not needed or served; docs/vllm.md has them."""

from collections.abc import Iterable

ELSEWHERE = {
    "--gpu-memory-utilization": "--num-blocks says how large the caches are",
    "--kv-cache-dtype": "it is --quantization",
    "--attention-backend": "it is --implementation",
    "--speculative-config": "it is --speculative and --num-speculative-tokens",
    "--enforce-eager": "every step is compiled",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-auto-tool-choice": "tools are always served",
    "--generation-config": "generation_config.json is always read",
    "--trust-remote-code": "no code of a checkpoint is run",
    "--download-dir": "nothing is downloaded",
    "--tokenizer": "it is the folder's tokenizer.json",
    "--data-parallel-size": "start a server for each",
    "--pipeline-parallel-size": "--tensor-parallel-size spreads a model over devices",
}


def told_of(unknown: Iterable[str]) -> str:
    """What an error says in brackets of vLLM's options among words that are none here; of others nothing."""
    names = dict.fromkeys(word.partition("=")[0].replace("_", "-") for word in unknown)
    told = [f"{name} is vLLM's: here {ELSEWHERE[name]}" for name in names if name in ELSEWHERE]
    return f" ({'; '.join(told)})" if told else ""
