"""vLLM's endpoints that tokenize and detokenize text, and describe the tokenizer."""

from starlette.requests import Request
from starlette.responses import Response

from rwkv.errors import UserError
from rwkv.serving.answers import token_string
from rwkv.serving.http.errors import ApiError, json_response
from rwkv.serving.openapi import GENERATION, Endpoint
from rwkv.serving.schema import DetokenizeRequest, TokenizeRequest, read
from rwkv.serving.service import Service, handle_body, resolve_adapter
from rwkv.serving.submission import encode_field
from rwkv.tokenizer.decoders import LAST_IDS


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Describes the tokenizer in vLLM's format, as lm-evaluation-harness with the model type local-completions expects."""
    end = service.tokenizer.end_of_text
    name = token_string({"token": end, "text": service.tokenizer.decode([end])})
    return json_response({"tokenizer_class": service.tokenizer.kind, "vocab_size": service.tokenizer.vocab_size,
                          "model_max_length": service.config.max_prompt_tokens, "eos_token": name, "eos_token_id": end,
                          "bos_token": name, "bos_token_id": end, "pad_token": name, "chat_template": None})


async def tokenize(service: Service, request: Request) -> Response:
    return await handle_body(service, request, _tokenize)


def _tokenize(service: Service, raw_body: bytes) -> Response:
    body = read(raw_body, TokenizeRequest)
    resolve_adapter(service, body.model)
    ids = encode_field(service.tokenizer.encode, body.prompt, "prompt")
    content = {"tokens": ids, "count": len(ids), "max_model_len": service.config.max_prompt_tokens}
    if body.return_token_strs:
        content["token_strs"] = [token_string({"token": token, "text": name})
                                 for place, token in enumerate(ids)
                                 for name in service.tokenizer.names([token], ids[max(0, place - LAST_IDS):place])]
    return json_response(content)


async def detokenize(service: Service, request: Request) -> Response:
    return await handle_body(service, request, _detokenize)


def _detokenize(service: Service, raw_body: bytes) -> Response:
    body = read(raw_body, DetokenizeRequest)
    resolve_adapter(service, body.model)
    try:
        return json_response({"prompt": service.tokenizer.decode(body.tokens)})
    except UserError as error:
        raise ApiError(400, str(error), "tokens") from None


ENDPOINTS = (
    Endpoint("/tokenizer_info", "GET", tokenizer_info),
    Endpoint("/tokenize", "POST", tokenize, TokenizeRequest, errors=GENERATION["errors"]),
    Endpoint("/detokenize", "POST", detokenize, DetokenizeRequest, errors=GENERATION["errors"]),
)
