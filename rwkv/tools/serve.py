"""Serves a checkpoint over HTTP, with OpenAI's interface, to many clients at once.

  python serve.py                                       the latest run
  python serve.py checkpoint=FILE.pth dtype=int8 port=8080
  python serve.py checkpoint=DIRECTORY api_key=KEY host=0.0.0.0

  curl http://127.0.0.1:8000/v1/completions -H content-type:application/json \\
       -d '{"prompt": "def main", "max_tokens": 50, "stream": true}'

With template=FILE, a jinja2 template that shows tools, requests may have tools
and tool_choice. What the model writes as <tool_call>{"name": ..., "arguments":
{...}}</tool_call> comes back as tool_calls. A tool_choice of required or of one
function begins the answer with a call; the arguments are not held to a schema.

http://127.0.0.1:8000/ is a page for trying it. pip install '.[serve]' adds what
it needs. SIGTERM or Ctrl-C ends it when running texts have ended, a second one
at once. On Linux GOMP_SPINCOUNT is set as train.py --help explains.
"""

from kernels.backends import allocator, threads
from rwkv import cli
from rwkv.config import ServeConfig
from rwkv.errors import UserError


def serve(config: ServeConfig, line: cli.CommandLine) -> None:
    try:
        from rwkv.serving import server
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs the package {error.name}: pip install '.[serve]'") from None
    server.serve(config)


def main() -> None:
    threads.wait_briefly()               # before torch is imported, here or in the engine's process, as the next
    allocator.use_large_pages()
    cli.run(serve, ServeConfig, "serve", __doc__)


if __name__ == "__main__":
    main()
