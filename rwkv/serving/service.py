"""What the endpoints share: the Service object, reading a request's body and owner, and resolving model names."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from rwkv.chat.template import ChatTemplate
from rwkv.chat.thoughts import Think
from rwkv.config import MIB, ServeConfig
from rwkv.serving.engine.compiling import Compilers
from rwkv.serving.engine.remote import RemoteEngine
from rwkv.serving.http.bodies import read_json
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import Defaults, ModelInfo
from rwkv.serving.metrics import Metrics
from rwkv.serving.responses.store import Responses
from rwkv.serving.sharing import SharedFolder
from rwkv.serving.states.client_states import ClientStates
from rwkv.tokenizer.tokenizers import Tokenizer

COMPLETION_TOKENS = 16                   # default max_tokens of a completion, as in OpenAI's API
LATEST = ":latest"                       # suffix of each name in Ollama's list of models
LONG = 2**16                             # a body with more bytes than this is handled in a thread, not in the event loop

Result = TypeVar("Result")


@dataclass
class Service:
    """The objects that all handlers share. defaults: as in Ready. model: the id of the checkpoint's model. stopping: whether
    new requests are refused."""

    config: ServeConfig
    model_info: ModelInfo
    defaults: Mapping[tuple[Think, bool], Defaults]
    engine: RemoteEngine
    tokenizer: Tokenizer
    template: ChatTemplate
    metrics: Metrics
    states: ClientStates
    responses: Responses
    compilers: Compilers
    model: str
    created: int
    shared: SharedFolder | None = None   # None without states_dir=
    stopping: bool = False


async def from_body(service: Service, request: Request, work: Callable[[Service, bytes], Result]) -> Result:
    """Reads the request's body and returns work(service, body). A long body is handled in a thread, so that no other request
    waits."""
    sent = await read_json(request, service.config.max_body_mib * MIB)
    return await asyncio.to_thread(work, service, sent) if len(sent) > LONG else work(service, sent)


def owner(request: Request) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner


def resolve_adapter(service: Service, name: str | None) -> str:
    """The adapter that a request names; "" for the checkpoint's model. Raises ApiError for an unknown name.

    The name may have a prefix that a gateway has added, as in openai/NAME, and may end with ":latest".
    """
    if name is None:
        return ""
    by_id = {service.model: "", **{adapter: adapter for adapter in service.engine.adapters}}
    for spelling in (name, name.removesuffix(LATEST)):
        if spelling in by_id:
            return by_id[spelling]
        for model_id, adapter in by_id.items():
            if spelling.endswith(f"/{model_id}"):
                return adapter
    raise ApiError(404, f"unknown model {name[:100]!r}; this server has {', '.join(map(repr, by_id))}", "model",
                   "model_not_found")


def default_max_tokens(service: Service, usual: Defaults) -> dict[str, int]:
    limit = service.config.max_tokens
    return {"completions": min(usual.max_tokens or COMPLETION_TOKENS, limit), "chat": min(usual.max_tokens or limit, limit)}
