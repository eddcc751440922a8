"""`POST /tokenize` and `/detokenize`, as vLLM has them."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jattn.serving.engine.text import encoded
from jattn.serving.server.bodies import read
from jattn.serving.server.conversation import chat_tokens
from jattn.serving.server.protocol import DetokenizeBody, TokenizeChatBody, TokenizeCompletionBody
from jattn.serving.server.sampling import refuse_other
from jattn.serving.server.service import Service


async def tokenize(request: Request) -> Response:
    """The tokens of a text or of a conversation."""
    service: Service = request.app.state.service
    body: TokenizeCompletionBody | TokenizeChatBody = await read(
        request, TokenizeCompletionBody | TokenizeChatBody
    )
    service.check_model(body.model)
    if isinstance(body, TokenizeChatBody):
        refuse_other("chat_template", body.chat_template, ())
        ids = await chat_tokens(service, body)
    else:
        special = body.add_special_tokens
        (ids,) = await encoded(service.tokenizer, [body.prompt], add_special_tokens=special)
    texts = [service.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    longest = service.info.max_model_len
    told = {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts}
    return JSONResponse(told)


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    service: Service = request.app.state.service
    body: DetokenizeBody = await read(request, DetokenizeBody)
    service.check_model(body.model)
    return JSONResponse({"prompt": service.text_of("tokens", body.tokens)})
