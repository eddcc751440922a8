"""The completions endpoint, `POST /v1/completions`."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.serving.engine.detokenizer import tokenize_async
from jattn.serving.engine.outputs import Logprobs, RequestOutput
from jattn.serving.server.logprobs import TextOffsets, TokenFormatter, finite
from jattn.serving.server.protocol import CompletionBody, read_body
from jattn.serving.server.responses import CompletionResponder
from jattn.serving.server.sampling_params import (
    check_context_length,
    check_supported,
    output_constraint,
    to_sampling_params,
    truncate_prompt,
)
from jattn.serving.server.service import Service


class CompletionFormatter:
    """`ResponseFormatter` of text completions."""

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"
    response_type = "Completion"

    def __init__(
        self,
        token_formatter: TokenFormatter,
        body: CompletionBody,
        prompts: Sequence[tuple[list[int], str]],
    ) -> None:
        """Create the formatter of one request.

        Args:
            token_formatter: Formatter of tokens.
            body: Request body.
            prompts: Token ids and text of each prompt.
        """
        self._tokens, self._body, self._prompts = token_formatter, body, prompts
        self._offsets: dict[int, TextOffsets] = {}  # Offsets of each completion that has begun.

    def first_choice(self, index: int) -> None:
        """Return None: streams begin with the first output."""

    def extra_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return no fields: the choices contain everything."""
        return {}

    def choice(self, index: int, output: RequestOutput, *, is_chunk: bool) -> dict[str, Any]:
        """Return the text, its log-probabilities and the finish reason."""
        prompt_ids, prompt = self._prompts[index // (self._body.n or 1)]
        is_first = index not in self._offsets
        if is_first:
            self._offsets[index] = self._tokens.text_offsets(
                prompt_ids, skip_special_tokens=self._body.skip_special_tokens
            )
        has_text = self._body.max_tokens != 0  # Otherwise only the prompt is scored.
        new_ids, text = (output.new_token_ids, output.new_text) if has_text else ([], "")
        logprobs: list[Logprobs | None] = [*(output.logprobs or ())] if has_text else []
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if not has_text and finish_reason == "stop":
            finish_reason, stop_reason = "length", None
        ids, echoes_prompt = new_ids, self._body.echo and is_first
        if echoes_prompt:
            ids, text = [*prompt_ids, *ids], prompt + text
            logprobs = [*(output.prompt_logprobs or ()), *logprobs]
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra = {"token_ids": new_ids, "prompt_token_ids": prompt_ids if is_first else None}
        if self._body.prompt_logprobs is not None:
            extra["prompt_logprobs"] = self._tokens.prompt_logprobs(output.prompt_logprobs or ())
        choice_logprobs = None
        if self._body.logprobs is not None:
            offsets = self._offsets[index].next_offsets(ids, prompt if echoes_prompt else None)
            choice_logprobs = self._logprobs(ids, logprobs, offsets)
        return extra | {
            "index": index,
            "text": text,
            "logprobs": choice_logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _logprobs(
        self, ids: list[int], logprobs: list[Logprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        name = self._tokens.name
        positions = list(zip(ids, logprobs, strict=True))
        top_logprobs = None
        if self._body.logprobs:
            top_logprobs = [
                None
                if position is None
                else {name(i): finite(logprob.logprob) for i, logprob in position.items()}
                for position in logprobs
            ]
        return {
            "tokens": [name(token) for token in ids],
            "token_logprobs": [position and finite(position[token].logprob) for token, position in positions],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


async def create_completion(request: Request) -> Response:
    """Complete the prompts of a request."""
    service: Service = request.app.state.service
    body: CompletionBody = await read_body(request, CompletionBody)
    service.check_model(body.model)
    check_supported(body, {"suffix": ("",)})
    prompts = await _tokenize_prompts(service, body)
    for prompt_ids, _ in prompts:
        check_context_length("prompt", len(prompt_ids), body.max_tokens, service.info.max_model_len)
    constraint = output_constraint(body)
    params = to_sampling_params(
        body, service.default_sampling, constraint, **_length_params(body), **_candidate_params(body)
    )
    formatter = CompletionFormatter(service.token_formatter_for(body), body, prompts)
    token_ids = [prompt_ids for prompt_ids, _ in prompts]
    responder = CompletionResponder(service, body, token_ids, params, formatter, constraint)
    return await responder.respond(request)


def _candidate_params(body: CompletionBody) -> dict[str, Any]:
    """Return the number of generated completions per prompt, and the log-probabilities that rank them.

    With `best_of`, the `n` completions with the highest mean log-probability are returned.

    Raises:
        ValueError: If `best_of` is less than n, or is combined with greedy sampling or streaming.
    """
    num, best_of = body.n or 1, body.best_of
    if best_of is None or best_of == num:
        return {"n": num, "logprobs": body.logprobs}
    if best_of < num:
        raise ValueError(f"best_of must be at least n={num}, got {best_of}.")
    if body.temperature == 0:
        raise ValueError(f"best_of must equal n={num} if temperature=0, got {best_of}.")
    if body.stream:
        raise ValueError(f"best_of must equal n={num} if stream=true, got {best_of}.")
    return {"n": best_of, "logprobs": body.logprobs or 0}


def _length_params(body: CompletionBody) -> dict[str, Any]:
    """Return max_tokens and prompt_logprobs. Scoring a prompt (echo, max_tokens=0) generates one token."""
    scores_only = body.echo and body.max_tokens == 0
    echoes_logprobs = body.echo and body.prompt_logprobs is None
    return {
        "max_tokens": 1 if scores_only else body.max_tokens,
        "prompt_logprobs": body.logprobs if echoes_logprobs else body.prompt_logprobs,
    }


async def _tokenize_prompts(service: Service, body: CompletionBody) -> list[tuple[list[int], str]]:
    """Return the token ids and the text of each prompt."""
    prompt: Any = body.prompt
    if not isinstance(prompt, str) and not prompt:  # "" may become a BOS token.
        raise ValueError("prompt must contain at least one token or prompt, got [].")
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    service.check_num_completions(len(prompts) * (body.best_of or body.n or 1))
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded_texts = iter(
        await tokenize_async(service.tokenizer, texts, add_special_tokens=body.add_special_tokens)
    )
    tokenized = []
    for prompt in prompts:
        text: str | None = prompt if isinstance(prompt, str) else None
        ids: list[int] = prompt if text is None else next(encoded_texts)
        truncated = truncate_prompt(body, ids, service.info.longest, body.max_tokens)
        if body.echo and (text is None or len(truncated) < len(ids)):
            text = service.decode_tokens("prompt", truncated)
        tokenized.append((truncated, text or ""))
    return tokenized
