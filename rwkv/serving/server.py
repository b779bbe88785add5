"""Starts the server: binds the address, starts the engine, prints the plan, and serves until a signal arrives."""

import asyncio
import errno
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import uvicorn

from rwkv.chat.encoding import for_tokenizer
from rwkv.chat.turn_templates import chat_template
from rwkv.config import ServeConfig
from rwkv.errors import UserError
from rwkv.io.lines import count_of
from rwkv.io.signals import STOPPING, StopRequest
from rwkv.serving.api import application
from rwkv.serving.engine.compiling import Compilers
from rwkv.serving.engine.remote import RemoteEngine, Work
from rwkv.serving.http.connections import IDLE_S, Protocol, Server
from rwkv.serving.http.origins import LOCAL_HOSTS
from rwkv.serving.log import say
from rwkv.serving.messages import Ready
from rwkv.serving.metrics import Metrics
from rwkv.serving.responses.store import Responses
from rwkv.serving.service import Service
from rwkv.serving.shared_folder import SharedFolder
from rwkv.serving.states.client_states import ClientStates
from rwkv.serving.states.folder_lock import claim
from rwkv.tokenizer.tokenizers import Tokenizer

LONG_TEXT = "a long text. " * 6000       # exceeds SHORT in rwkv/tokenizer/world.py, so that encoding it loads the fast library
AFTER_GRACE = 10                         # seconds allowed for sending the last events
OTHER_FILES = 128                        # maximum open files of the HTTP process besides connections


def serve(config: ServeConfig, work: Work) -> None:
    """Serves until a signal such as SIGINT or SIGTERM arrives. Exits with status 1 if the engine's process ends before that.

    `work` is the main function of the engine's process. Raises UserError for an invalid address or option, before the model is
    loaded.
    """
    if _model_name(config) in config.adapter_paths:
        raise UserError(f"an adapter conflicts with the checkpoint: both have the name {_model_name(config)!r}. Rename the "
                        "adapter in adapters=, or rename the checkpoint with model_name=")
    listener = _bind(config)
    lock = claim(Path(config.states_dir)) if config.states_dir else None
    is_open = config.host not in LOCAL_HOSTS and not config.api_key
    warning = "; without api_key=, anyone who can connect can use the server" if is_open else ""
    say("address", f"http://{_url_host(config.host)}:{listener.getsockname()[1]}{warning}")
    # Until uvicorn handles signals, sys.exit runs the `finally` block that ends the engine's process
    with StopRequest(tuple(number for number in STOPPING if number != signal.SIGINT), lambda number: sys.exit(128 + number)):
        engine = RemoteEngine(config, work)
        try:
            ready = engine.wait_until_ready()
            for subject, text in ready.plan:
                say(subject, text)
            _run(config, engine, ready, listener)
            if engine.failed is not None:
                sys.exit(1)              # the reason has been printed
        finally:
            engine.close()
            if lock is not None:
                lock.release()


def _bind(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if sys.platform == "win32":          # here SO_REUSEADDR would let two servers use one port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen()                # before this call another server could bind the port
    except (OSError, TypeError) as error:        # TypeError: the host cannot be encoded, such as an ellipsis
        listener.close()
        hint = ""
        if isinstance(error, (socket.gaierror, TypeError)):
            hint = ". host= must be an IP address or a host name, without brackets, a port or http://"
        elif error.errno == errno.EADDRINUSE:
            hint = ". Set port= to another port, or to 0 for any free port"
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {config.host} port {config.port}: {reason}{hint}") from None
    return listener


def _run(config: ServeConfig, engine: RemoteEngine, ready: Ready, listener: socket.socket) -> None:
    tokenizer = Tokenizer.from_dict(ready.tokenizer)
    tokenizer.encode(LONG_TEXT)          # loads the library, for which the first long prompt would wait
    template = for_tokenizer(chat_template(ready.template), tokenizer)
    compilers = Compilers(ready.tokenizer)
    responses = Responses(config, engine)
    service = Service(config, ready.model_info, ready.defaults, engine, tokenizer, template,
                      Metrics(lambda: engine.n_running, lambda: engine.n_queued),
                      ClientStates(config, engine.states, engine.adapters, tokenizer, template, ready.state_bytes),
                      responses, compilers, _model_name(config), int(time.time()),
                      SharedFolder(Path(config.states_dir), engine, responses) if config.states_dir else None)
    engine.observe = service.metrics.observe
    Protocol.receive_s = config.receive_s
    Protocol.most = _allow_connections(config.max_connections)
    options = uvicorn.Config(application(service), http=Protocol, lifespan="off", log_config=None,
                             log_level="error", access_log=False, server_header=False, ws="none",
                             timeout_keep_alive=IDLE_S,
                             timeout_graceful_shutdown=int(config.grace_s + AFTER_GRACE))

    def stop() -> None:
        if not service.stopping:
            grace = count_of(config.grace_s, "second")
            say("stopping", f"running requests have {grace} to finish; a second Ctrl-C or SIGTERM ends them immediately")
            service.stopping = True
            asyncio.get_running_loop().call_later(config.grace_s, engine.cancel_all)

    def on_started() -> None:
        say("ready", ", ".join((service.model, *engine.adapters)))
        say("try", _example(config, listener))

    server = Server(options, on_started, stop)

    def engine_ended(reason: str) -> None:
        say("engine", f"the engine has stopped ({reason}), so the server stops")
        server.should_exit = True

    async def main() -> None:
        engine.report = engine_ended
        engine.attach(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            runner.run(main())
    finally:
        compilers.close()


def _allow_connections(most: int) -> int:
    """Raises this process's limit on open files for this many connections. Returns the number that the limit then allows.

    Many systems allow a process only 1024 open files until it asks for more. At the limit, uvloop closes new connections.
    """
    if sys.platform == "win32":
        return most
    import resource

    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + OTHER_FILES
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return most
    with suppress(OSError, ValueError):          # macOS allows fewer files than the highest limit that it reports
        target = needed if highest == resource.RLIM_INFINITY else min(needed, highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, highest))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = min(most, max(limit - OTHER_FILES, 1))
    if allowed < most:
        say("limits", f"the system allows {limit} open files: at most {count_of(allowed, 'connection')} instead of "
                      f"max_connections={most}. Raise the system's limit, such as with ulimit -n")
    return allowed


def _model_name(config: ServeConfig) -> str:
    path = Path(config.checkpoint).resolve()
    name = path.name if path.is_dir() else path.stem
    return config.model_name or name.encode(errors="replace").decode()       # JSON requires a name in UTF-8


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ModuleNotFoundError:
        say("loop", "asyncio. The package uvloop, which Windows lacks, would answer more requests per second")
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _example(config: ServeConfig, listener: socket.socket) -> str:
    key = ' -H "authorization: Bearer $KEY"' if config.api_key else ''
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
    host = "localhost" if config.host in ("0.0.0.0", "::") else _url_host(config.host)
    address = f"http://{host}:{listener.getsockname()[1]}/v1/chat/completions"
    return f"curl {address}{key} -H content-type:application/json -d '{body}'"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host          # IPv6
