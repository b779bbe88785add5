"""Shared by the endpoints: the server's parts, a request's owner, and model names."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from rwkv.chat.template import ChatTemplate
from rwkv.chat.thoughts import Think
from rwkv.config import ServeConfig
from rwkv.serving.compiling import Compilers
from rwkv.serving.errors import ApiError
from rwkv.serving.messages import Defaults, ModelInfo
from rwkv.serving.metrics import Metrics
from rwkv.serving.remote import RemoteEngine
from rwkv.serving.responses import Responses
from rwkv.serving.sharing import SharedFolder
from rwkv.serving.states import ClientStates
from rwkv.tokenizer.tokenizers import Tokenizer

COMPLETION_TOKENS = 16                   # max_tokens of a completion, OpenAI's
LATEST = ":latest"                       # ends each name in Ollama's list of models


@dataclass
class Service:
    """Shared by the handlers. defaults: as in Ready. model: the id of the checkpoint's model. stopping: refuse new requests."""

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
    shared: SharedFolder | None = None   # states_dir=
    stopping: bool = False


def owner(request: Request) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner


def resolve_adapter(service: Service, name: str | None) -> str:
    """The adapter that a request names; "" for the checkpoint's own model. Raises ApiError for an unknown name.

    A name may have a prefix that a gateway added, openai/NAME, and end with ":latest".
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
