"""Serves a checkpoint over HTTP, with the APIs of OpenAI, Ollama and Anthropic.

  python serve.py                                       the latest run
  python serve.py checkpoint=rwkv7-g1k-1.5b-20260930-ctx25600.pth dtype=int8
  python serve.py checkpoint=DIRECTORY api_key=KEY host=0.0.0.0

  curl http://127.0.0.1:8000/v1/completions -H content-type:application/json \\
       -d '{"prompt": "def main", "max_tokens": 50, "stream": true}'

With the chat template g1, the default for G1 models, with flower, or with a
jinja2 template that shows tools, requests may have tools and tool_choice. Calls
by the model, {"name": ..., "arguments": {...}} in a fence, after <tool_call> or
bare, are returned as tool_calls. A tool_choice of required or of one function
forces a call, whose arguments must match the function's schema. "strict": true
in a function enforces its schema in all calls.

Reasoning is returned in reasoning_content, separate from content. How an answer
begins is set by think (true, false or fake) or enable_thinking in
chat_template_kwargs, or by reasoning_effort (none, minimal, low, medium, high).

POST /v1/states prefills a prompt or messages, or uploads a state file, and
returns an id; "state": ID in a request continues from there without another
prefill, and "save_state": true saves the state after an answer. /v1/responses
continues previous_response_id from such a state (docs/chat.md).

Clients of Ollama (/api/chat, ...) and Anthropic (/v1/messages) use the same
server; /v1/embeddings returns embeddings. Clients' settings: docs/clients.md.

adapters=NAME=RUN,... serves runs of tune=state and tune=lora as further models
(docs/serve.md).

http://127.0.0.1:8000/ is a page to try the server. pip install -e '.[serve]'
installs its packages. SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C lets running requests
finish, then exits; a second SIGTERM or Ctrl-C exits immediately. On Linux,
GOMP_SPINCOUNT is set as train.py --help explains.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.machine import allocator, threads
from rwkv import cli
from rwkv.chat.thoughts import THOUGHT_STARTS, Think
from rwkv.cli.garbage import without_garbage_collection
from rwkv.config import MIB, ServeConfig
from rwkv.errors import UserError
from rwkv.io.lines import count_of
from rwkv.io.utf8 import read_text
from rwkv.programs.sampling import ChosenSampling, SamplingChoice
from rwkv.serving.log import say

if TYPE_CHECKING:
    from rwkv.model.base import Model
    from rwkv.serving.engine.worker import Loaded


def serve(config: ServeConfig, line: cli.CommandLine) -> None:
    from rwkv.checkpoint.option_files import on_disk, require_adapters, require_files

    try:
        from rwkv.serving import server
    except ModuleNotFoundError as error:
        raise UserError(f"serving requires the package {error.name}: run pip install -e '.[serve]' in a clone of the "
                        "repository") from None
    if config.api_key_file is not None:
        config = replace(config, api_key=[*config.api_key, *_keys_in(config.api_key_file)])
    require_files(config, config.template)
    require_adapters(config)
    say("loading", config.checkpoint)
    server.serve(on_disk(config), partial(run_engine, user_keys=line.keys))


def _keys_in(path: str) -> list[str]:
    """Returns the API keys in a file, one per line. Raises UserError for a file without keys, which would open the server.

    A line `null` is not a key, as in api_key=null. Some programs write null if they find no key.
    """
    name = f"api_key_file={path}"
    keys = [key for line in read_text(Path(path), name).split("\n") if (key := line.strip()) not in ("", "null")]
    if not keys:
        raise UserError(f"{name} has no keys: the file must have one key per line")
    return keys


def run_engine(connection: Connection, config: ServeConfig, user_keys: Collection[str]) -> None:
    """Runs the engine in a separate process, which alone imports torch."""
    from rwkv.serving.engine import worker

    worker.main(connection, config, partial(load, user_keys=user_keys))


@without_garbage_collection()
def load(config: ServeConfig, user_keys: Collection[str] = ()) -> "Loaded":
    """Loads the model and the adapters. `user_keys` has the options that the user has set."""
    import torch

    from rwkv.chat.turn_templates import chat_template
    from rwkv.generation.decoder import decoding_line
    from rwkv.model.base import n_parameters, state_nbytes
    from rwkv.model.decoding.c_step import step_of, why_not
    from rwkv.pretrained import open_checkpoint, template_choice, template_line, trained_length_of
    from rwkv.programs.adapters import read_adapters
    from rwkv.programs.draft import open_draft
    from rwkv.serving.engine.worker import Loaded, LoadedAdapter
    from rwkv.serving.messages import Defaults

    opened = open_checkpoint(config)
    choice = template_choice(opened.checkpoint, config.template)
    template = chat_template(choice.template)            # mistakes in templates and adapters show up before the slow loading
    sampling = SamplingChoice(config, user_keys, opened.checkpoint.path, opened.checkpoint.run, template)
    chosen = {(think, tools): sampling.for_answers(think, tools) for tools in (False, True) for think in THOUGHT_STARTS}
    adapters = read_adapters(config, opened)
    opened_draft = open_draft(config, opened)
    model = opened.model()
    n = n_parameters(model.config, model.vocab_size)
    weights = opened.nbytes()
    row = state_nbytes(model.config) + 4 * model.vocab_size
    if why_not(model) is None:
        weights += sum(tensor.nbytes for tensor in step_of(model).own_tensors)
    draft, draft_line = opened_draft.load(model) if opened_draft else (None, "")
    loaded = {}
    for adapter in adapters:
        loaded[adapter.name] = LoadedAdapter(*adapter.load(opened, model), adapter.tokens, adapter.digest)
    copies = sum(adapter.merged is not None for adapter in adapters)
    plan = [("model", f"{model.generation.NAME}, {count_of(model.config.n_layer, 'layer')}, {model.config.n_embd} wide, "
                      f"{n:,} parameters, vocabulary {model.vocab_size}"),
            ("kernel", f"{opened.wkv.name} on {opened.device}, {opened.dtype}, threads {torch.get_num_threads()}"),
            *opened.lines(),
            ("decoding", decoding_line(model).partition(": ")[2]),
            *([("draft", draft_line)] if draft_line else []),
            ("chat", f"template {template_line(opened.checkpoint, choice)}"),
            *(("sampling", line) for line in _sampling_lines(chosen)),
            *(("adapter", f"{adapter.name}: {line}") for adapter in adapters for line in (adapter.about, *adapter.notes)),
            ("memory", f"weights about {weights * (1 + copies) / MIB:,.0f} MiB; prefix cache {config.cache_mib:,} MiB; "
                       f"at most {count_of(config.max_rows, 'sequence')} of {row / MIB:.2f} MiB each"),
            *_gpu_lines(model, config, copies, opened.device),
            ("states", _states_line(config, row)),
            ("limits", f"answers end after at most {count_of(config.max_tokens, 'token')}, even if a request asks for more; "
                       f"prompts have at most {count_of(config.max_prompt_tokens, 'token')}")]
    defaults = {kind: Defaults(each.sampling, each.stop, each.max_new_tokens) for kind, each in chosen.items()}
    return Loaded(model, opened.tokenizer, choice.template, plan, row, defaults, trained_length_of(opened.checkpoint).tokens,
                  loaded, opened.dtype, draft)


def _gpu_lines(model: "Model", config: ServeConfig, copies: int, device: str) -> list[tuple[str, str]]:
    """Returns lines on the GPU's memory, concurrent sequences and the warm-up, or no lines on a CPU.

    `copies` is the number of copies of the weights for merged adapters. Raises UserError if max_rows sequences do not fit.
    """
    import torch

    from rwkv.generation.prefill import chunks_on
    from rwkv.generation.sampling import GPU_BYTES
    from rwkv.model.base import state_nbytes
    from rwkv.model.decoding import triton_step

    if device == "cpu":
        return []
    rows, graphs = config.max_rows, triton_step.why_not(model) is None
    size = triton_step.step_of(model).nbytes_for(rows) if graphs else rows * (state_nbytes(model.config) + 4 * model.vocab_size)
    size = (size + rows * GPU_BYTES * model.vocab_size) * (1 + copies)
    free, total = torch.cuda.mem_get_info()
    if size > free:
        raise UserError(f"max_rows={rows} requires {size / MIB:,.0f} MiB of GPU memory in addition to the weights, but only "
                        f"{free / MIB:,.0f} MiB are free: set a smaller max_rows=")
    chunks = chunks_on(torch.device(device))
    lines = [("GPU", f"{torch.cuda.get_device_name()}, {total / MIB:,.0f} MiB, "
                     f"{free / MIB:,.0f} MiB free after loading the weights"),
             ("concurrency", f"{count_of(rows, 'sequence')} in {size / MIB:,.0f} MiB of memory; prompts in chunks of up to "
                             f"{chunks.longest:,} tokens, at most {chunks.budget:,} between two tokens of running sequences")]
    if graphs:
        buckets = ", ".join(map(str, triton_step.buckets_to(rows)))
        lines.append(("warm-up", f"compiles all kernels and captures CUDA graphs for {buckets} sequences"))
    return lines


def _sampling_lines(chosen: Mapping[tuple[Think, bool], ChosenSampling]) -> list[str]:
    """Returns lines on the sampling options: one line for most answers, and one for each kind of answer with other options.

    `chosen` has the options by the value of `think` and by whether the conversation has tools.
    """
    usual = chosen[False, False]
    lines = [f"{usual}; requests may override them"]
    for (think, tools), each in chosen.items():
        if tools and each == chosen[think, False]:
            continue
        if each != usual:
            lines.append(f"with think={str(think).lower()}{' and tools' * tools}: {each}")
    return lines


def _states_line(config: ServeConfig, size: int) -> str:
    """Returns a line about saved states. `size` is the bytes of one state."""
    if config.states_mib * MIB < size and not config.states_dir:
        return f"off: a saved state requires {size / MIB:.3g} MiB, but states_mib={config.states_mib}"
    memory = f"{config.states_mib:,} MiB of memory for {config.states_mib * MIB // size:,} saved states"
    if config.states_dir:
        return f"{memory}, and {config.states_dir_mib:,} MiB in {config.states_dir}"
    return f"{memory}; when it is full, the least recently used states are evicted"


def main() -> None:
    threads.wait_briefly()               # this call and the next must precede the import of torch in the engine's process
    allocator.use_large_pages()
    cli.run(serve, ServeConfig, "serve", __doc__)


if __name__ == "__main__":
    main()
