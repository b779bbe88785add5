"""The Service object that all endpoints share, and functions that read a request's body, owner and model name."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from rwkv.chat.interface import ChatTemplate
from rwkv.chat.thoughts import Think
from rwkv.config import MIB, ServeConfig
from rwkv.serving.engine.compiling import Compilers
from rwkv.serving.engine.remote import RemoteEngine
from rwkv.serving.http.bodies import read_json
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import Defaults, ModelInfo
from rwkv.serving.metrics import Metrics
from rwkv.serving.responses.store import Responses
from rwkv.serving.shared_folder import SharedFolder
from rwkv.serving.states.client_states import ClientStates
from rwkv.tokenizer.tokenizers import Tokenizer

COMPLETION_TOKENS = 16                   # default max_tokens of a completion, as in OpenAI's API
LATEST = ":latest"                       # the suffix of each name in Ollama's list of models
LONG_BODY = 2**16                        # a thread handles bodies with more bytes than this

Result = TypeVar("Result")


@dataclass
class Service:
    """The objects that all handlers share.

    Attributes:
        defaults: the default options of requests, as in messages.Ready.
        model: the id of the checkpoint's model.
        shared: the folder states_dir=; None without this option.
        stopping: whether new requests are refused.
    """

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
    shared: SharedFolder | None = None
    stopping: bool = False


async def handle_body(service: Service, request: Request, work: Callable[[Service, bytes], Result]) -> Result:
    """Reads the request's body and returns work(service, body).

    Runs `work` in a thread if the body is long, so that no other request waits.
    """
    raw_body = await read_json(request, service.config.max_body_mib * MIB)
    return await asyncio.to_thread(work, service, raw_body) if len(raw_body) > LONG_BODY else work(service, raw_body)


def owner(request: Request) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner


def resolve_adapter(service: Service, name: str | None) -> str:
    """Returns the adapter that a request names, or "" for the checkpoint's model. Raises ApiError for an unknown name.

    The name may have a gateway's prefix, as in openai/NAME, and may end with ":latest". Without a name, or with "", the request
    is for the checkpoint's model.
    """
    if not name:                         # clients that expect a single model send ""
        return ""
    by_id = {service.model: "", **{adapter: adapter for adapter in service.engine.adapters}}
    for spelling in (name, name.removesuffix(LATEST)):
        if spelling in by_id:
            return by_id[spelling]
        for model_id, adapter in by_id.items():
            if spelling.endswith(f"/{model_id}"):
                return adapter
    raise ApiError(404, f"the model {name[:100]!r} is unknown. This server has {', '.join(map(repr, by_id))}", "model",
                   "model_not_found")


def default_max_tokens(service: Service, usual: Defaults) -> dict[str, int]:
    limit = service.config.max_tokens
    return {"completions": min(usual.max_tokens or COMPLETION_TOKENS, limit), "chat": min(usual.max_tokens or limit, limit)}
