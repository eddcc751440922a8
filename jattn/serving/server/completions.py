"""`POST /v1/completions`."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.serving.engine.detokenizer import tokenize_async
from jattn.serving.engine.outputs import Logprobs, RequestOutput
from jattn.serving.server.logprobs import TextOffsets, TokenTexts, finite
from jattn.serving.server.protocol import CompletionBody, read
from jattn.serving.server.responses import Job
from jattn.serving.server.sampling_params import (
    refuse,
    require_place,
    sampling_params,
    truncated,
    wanted_form,
)
from jattn.serving.server.service import Service, texts_of
from pallas_kernels.checks import require


class TextShape:
    """Completions of texts."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, texts: TokenTexts, body: CompletionBody, prompts: Sequence[tuple[list[int], str]]):
        """For prompts as tokens and as text."""
        self._texts, self._body, self._prompts = texts, body, prompts
        self._offsets: dict[int, TextOffsets] = {}  # of each completion that has begun

    def opening(self, index: int) -> None:
        """There is none."""

    def added(self, output: RequestOutput) -> dict[str, Any]:
        """Nothing: choices have it all."""
        return {}

    def choice(self, index: int, output: RequestOutput, *, is_chunk: bool) -> dict[str, Any]:
        """Text, and what was likely there."""
        prompt_ids, prompt = self._prompts[index // (self._body.n or 1)]
        begins, skips = index not in self._offsets, self._body.skip_special_tokens
        if begins:
            self._offsets[index] = self._texts.offsets(prompt_ids, skip_special_tokens=skips)
        has_text = self._body.max_tokens != 0  # else the prompt's log-probabilities are all that is wanted
        new_ids, text = (output.new_token_ids, output.new_text) if has_text else ([], "")
        logprobs: list[Logprobs | None] = [*(output.logprobs or ())] if has_text else []
        reason, stop_reason = output.finish_reason, output.stop_reason
        if not has_text and reason == "stop":
            reason, stop_reason = "length", None
        ids, echoes = new_ids, self._body.echo and begins
        if echoes:
            ids, text = [*prompt_ids, *ids], prompt + text
            logprobs = [*(output.prompt_logprobs or ()), *logprobs]
        told: dict[str, Any] = {}
        if self._body.return_token_ids:
            told = {"token_ids": new_ids, "prompt_token_ids": prompt_ids if begins else None}
        if self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._texts.of_prompt(output.prompt_logprobs or ())
        return told | {
            "index": index,
            "text": text,
            "logprobs": None
            if self._body.logprobs is None
            else self._logprobs(ids, logprobs, self._offsets[index].of(ids, prompt if echoes else None)),
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }

    def _logprobs(
        self, ids: list[int], logprobs: list[Logprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        name = self._texts.name
        rows = zip(ids, logprobs, strict=True)
        tokens = [name(token) for token in ids]
        num = self._body.logprobs
        return {
            "tokens": tokens,
            "token_logprobs": [place and finite(place[token].logprob) for token, place in rows],
            "top_logprobs": [
                place and {name(i): finite(one.logprob) for i, one in place.items()} for place in logprobs
            ]
            if num
            else None,
            "text_offset": offsets,
        }


async def create_completion(request: Request) -> Response:
    """Completes prompts."""
    service: Service = request.app.state.service
    body: CompletionBody = await read(request, CompletionBody)
    service.check_model(body.model)
    refuse(body, {"suffix": ("",)})
    prompts = await _prompts(service, body)
    for prompt, _ in prompts:
        require_place("prompt", len(prompt), body.max_tokens, service.info.max_model_len)
    form = wanted_form(body)
    params = sampling_params(body, service.default_sampling, form, **_lengths(body), **_candidates(body))
    shape = TextShape(texts_of(service, body), body, prompts)
    return await Job(service, body, [ids for ids, _ in prompts], params, shape, form).answer(request)


def _candidates(body: CompletionBody) -> dict[str, Any]:
    """How many completions of each prompt; of more than `n` those are told whose tokens are likeliest.

    Raises:
        ValueError: There are too few, or all would be the same, or there is no time to choose.
    """
    num, most = body.n or 1, body.best_of
    if most is None or most == num:
        return {"n": num, "logprobs": body.logprobs}
    require(most > num, "best_of", f"be at least n ({num})", most)
    require(body.temperature != 0, "best_of", "be n with temperature 0", most)
    require(not body.stream, "best_of", "be n in a stream", most)
    return {"n": most, "logprobs": body.logprobs or 0}


def _lengths(body: CompletionBody) -> dict[str, Any]:
    """How long, and what is told of the prompt. Scoring it (echo, no new token) takes one token."""
    scores = body.echo and body.max_tokens == 0
    echoes = body.echo and body.prompt_logprobs is None
    return {
        "max_tokens": 1 if scores else body.max_tokens,
        "prompt_logprobs": body.logprobs if echoes else body.prompt_logprobs,
    }


async def _prompts(service: Service, body: CompletionBody) -> list[tuple[list[int], str]]:
    """Each prompt as tokens and as text."""
    prompt: Any = body.prompt
    is_some = isinstance(prompt, str) or len(prompt) > 0  # of "" a tokenizer may make a BOS
    require(is_some, "prompt", "hold a token, or a prompt", repr(prompt))
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    service.require_room(len(prompts) * (body.best_of or body.n or 1))
    texts = [one for one in prompts if isinstance(one, str)]
    made = iter(await tokenize_async(service.tokenizer, texts, add_special_tokens=body.add_special_tokens))
    found = []
    for one in prompts:
        text: str | None = one if isinstance(one, str) else None
        ids: list[int] = one if text is None else next(made)
        kept = truncated(body, ids, service.info.longest, body.max_tokens)
        if body.echo and (text is None or len(kept) < len(ids)):
            text = service.text_of("prompt", kept)
        found.append((kept, text or ""))
    return found
