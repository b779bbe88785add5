"""Declares the options of serve.py."""

import re
from dataclasses import dataclass

from rwkv.config.common import MODEL_TEMPLATE, DraftedConfig, layout_option
from rwkv.config.sampling import Sampling, preset_option, with_sampling
from rwkv.config.schema import PATH, check_options, option
from rwkv.errors import UserError

# As browsers write an origin
ORIGIN = re.compile(r"\*|null|https?://[^/?#*\sA-Z]+|(?!https?:)[a-z][a-z0-9+.-]*://[^/?#*\s]+")
NEXT_PAIR = re.compile(r",(?=[^,=/\\]+=)")              # the comma before the next NAME=, because paths may contain commas


@dataclass
@with_sampling
class ServeConfig(DraftedConfig):
    model_name: str | None = option(None, "model id for clients; null: the checkpoint's name")
    adapters: list[str] = option(list, "NAME=PATH,...: further models, which requests select by name. PATH: the directory or "
                                 ".ckpt of a tune=state or tune=lora run from this checkpoint, a state file, or another "
                                 "program's tuned state or adapter; repeatable", filled=True)
    state_layout: str | None = layout_option("adapters=")
    template: str | None = option(None, f"chat template: {MODEL_TEMPLATE}", verbatim=PATH)
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces", heading="HTTP", filled=True)
    port: int = option(8000, "port; 0: any free port", least=0)
    api_key: list[str] = option(list, "API key that clients must send; repeatable, one per client; null: no keys", filled=True)
    api_key_file: str | None = option(None, "file of further API keys, one per line; other users of the machine can see "
                                      "api_key= on the command line", verbatim=PATH)
    cors: list[str] = option(list, "allowed CORS origin; repeatable", filled=True)
    sampling: str = preset_option("openai", heading="Sampling defaults for requests")
    max_rows: int = option(32, "batch size: sequences generated at a time", least=1, heading="Limits")
    max_queue: int = option(128, "queue size, in sequences; requests beyond it get status 429", least=0)
    max_tokens: int = option(4096, "maximum tokens per completion; a request that asks for more ends here, with finish_reason "
                             "length", least=1)
    max_prompt_tokens: int = option(32768, "maximum tokens per prompt", least=1)
    max_body_mib: int = option(8, "maximum size of a request body, MiB", least=1)
    max_connections: int = option(1024, "maximum open connections", least=1)
    receive_s: float = option(30.0, "time limit for receiving a request, in seconds", above=0.0)
    timeout_s: float = option(600.0, "time limit per completion, in seconds; then the partial text is returned", above=0.0)
    grace_s: float = option(30.0, "time for running requests to finish after SIGTERM, in seconds", least=0.0)
    cache_mib: int = option(256, "prefix-cache size, MiB; never shared between API keys; 0: off", least=0)
    states_mib: int = option(256, "memory for saved states (/v1/states, save_state), MiB; evicts the least recently used, "
                             "first those of API keys over their fair share; 0: off, unless states_dir= is set", least=0,
                             heading="Saved states")
    states_dir: str | None = option(None, "folder for saved states, which then survive eviction and restarts; servers may "
                                    "share it; null: memory only", verbatim=PATH)
    states_dir_mib: int = option(4096, "disk space for saved states, MiB; deletes the least recently used ones", least=1)
    responses_mib: int = option(64, "memory for stored responses (/v1/responses), MiB; evicts the least recently used; "
                                "states_dir= also stores them on disk; 0: off", least=0)

    def __post_init__(self) -> None:
        keys = self.api_key or []        # a YAML file may contain a single key or null
        self.api_key = [key for key in ([keys] if isinstance(keys, str) else keys) if key != "null"]
        check_options(self)
        _ = self.adapter_paths           # raises UserError for an adapter that is not NAME=PATH
        if self.port > 65535:
            raise UserError(f"port must be from 0 to 65535; got {self.port}")
        if wrong := [origin for origin in self.cors if not ORIGIN.fullmatch(origin)]:
            raise UserError("cors must be an origin as browsers write it, without a path and in lower case, such as "
                            f"https://page.example, or *; got {wrong[0]!r}")
        if "*" in self.cors and self.api_key:
            raise UserError("cors=* conflicts with api_key=, because any web page could use this server: list the allowed "
                            "origins in cors=")
        Sampling.from_config(self)

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Returns the adapters' paths by name. Raises UserError unless all are NAME=PATH with different names."""
        paths: dict[str, str] = {}
        for pair in (pair for pairs in self.adapters for pair in NEXT_PAIR.split(pairs)):
            name, _, path = pair.partition("=")
            if not name or not path:
                raise UserError(f"adapters must have the form NAME=PATH or NAME=PATH,NAME=PATH,...; got {pair!r}")
            if name in paths:
                raise UserError(f"adapters= uses the name {name!r} twice: give each adapter a different name")
            paths[name] = path
        return paths
