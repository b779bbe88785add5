"""Runs a smoke test of a model: loads, prefills, compares with the reference, generates, trains two steps, prints PASS or FAIL.

  python -m rwkv.tools.smoke                            tiny models, one of each generation
  python -m rwkv.tools.smoke FILE.pth --dtype bfloat16
  python -m rwkv.tools.smoke --out FILE.json            the file for the results; default: smoke.json

The reference is the same model with the kernel `reference`, in float32, on a CPU. If the model has more than 50 million
parameters, a tiny model of its generation is trained instead, with the same device and kernel. The exit status is 0 for PASS, 1
for FAIL.
"""

import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.arguments import Parser, from_home, path_of
from kernels.registry import KernelUnavailable, UnknownKernel
from rwkv.cli import exit_on_user_error
from rwkv.config import DTYPES, GENERATIONS, KernelConfig, SavedModelConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import wrap_hanging
from rwkv.io.output_file import require_writable
from rwkv.tools.doctor import findings, write_json

if TYPE_CHECKING:
    from torch import Tensor

PROMPT = "The quick brown fox"
TOKENS = 16                              # this many tokens are generated
TRAINABLE = 50_000_000                   # a tiny model is trained instead of one with more parameters
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1, "int8": 0.1, "int4": 0.5,
             "blocks": 1e-2}              # each is relative to the standard deviation of the logits
LEARNING_RATE = 1e-3


def main(arguments: list[str] | None = None) -> int:
    parser = Parser("rwkv.tools.smoke", __doc__)
    parser.add_argument("checkpoint", nargs="?", type=path_of, help="a checkpoint of any format; default: tiny models")
    parser.add_argument("--tokenizer", metavar="NAME", type=from_home,
                        help="tokenizer, for a checkpoint without one: byte, world, FILE.json or FILE.txt")
    parser.add_argument("--kernel", default="auto", help="the time-mixing kernel")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="device of the model")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="dtype of the weights")
    parser.add_argument("--out", default=Path("smoke.json"), type=path_of, metavar="FILE", help="default: smoke.json")
    options = parser.parse_args(arguments)
    with exit_on_user_error(), tempfile.TemporaryDirectory() as folder:
        require_writable("--out", options.out, [options.checkpoint, options.tokenizer])
        if options.checkpoint is None:
            paths = [_tiny(generation, Path(folder)) for generation in GENERATIONS]
        else:
            from rwkv.checkpoint.location import locate

            locate(options.checkpoint)   # raises UserError if the checkpoint is missing
            paths = [options.checkpoint]
        checks = [check for path in paths for check in _Checks(path, options, Path(folder)).run()]
        passed = all(check["passed"] for check in checks)
        write_json(options.out, {"result": "PASS" if passed else "FAIL", "kernel": options.kernel, "device": options.device,
                               "dtype": options.dtype, "checks": checks, "machine": findings()})
        print(f"{'PASS' if passed else 'FAIL'}: {options.out} has the details", flush=True)
        return 0 if passed else 1


def _tiny(generation: str, folder: Path) -> Path:
    """Writes a tiny model with the byte tokenizer. Its matrices are random, even those that initialisation sets to zero."""
    import torch

    from kernels.select import select
    from rwkv.config import ModelConfig
    from rwkv.model.base import generation as module_of
    from rwkv.pretrained import RWKV
    from rwkv.tokenizer.tokenizers import ByteTokenizer

    path = folder / f"{generation}-tiny.safetensors"
    if path.is_file():
        return path
    config = ModelConfig(generation=generation, n_layer=2, n_embd=64, ctx_len=64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RWKV(config, 256, select(module_of(config).OPERATOR, "reference")).init_weights()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.normal_(0, weight.shape[1] ** -0.5)
    model.save_pretrained(path, ByteTokenizer())
    return path


class _Checks:
    """Runs the checks of one checkpoint. If loading fails, the others are skipped. Raises UserError for a user's mistake."""

    def __init__(self, path: Path, options: Namespace, folder: Path) -> None:
        self._path = path
        self._options = options
        self._folder = folder
        self._results: list[JsonObject] = []

    def run(self) -> list[JsonObject]:
        if self._check("load", self._load):
            for name in ("read", "compare", "generate", "train"):
                self._check(name, getattr(self, f"_{name}"))
        return self._results

    def _check(self, name: str, check: Callable[[], str]) -> bool:
        """Runs one check and prints the result. `check` returns a sentence, or raises an exception if the model fails it."""
        start = time.monotonic()
        try:
            finding = check()
            passed = True
            details = None
        except Exception as error:       # the check has failed, unless the error is a user's mistake
            if name == "load" and isinstance(error, (UserError, UnknownKernel, KernelUnavailable)):
                raise
            finding = f"{type(error).__name__}: {error}".splitlines()[0]
            passed = False
            details = traceback.format_exc()
        seconds = time.monotonic() - start
        self._results.append({"checkpoint": self._path.name, "check": name, "passed": passed, "finding": finding,
                              "seconds": round(seconds, 3), "traceback": details})
        line = f"{'ok  ' if passed else 'FAIL'} {self._path.name} {name} ({seconds:.1f} s): {finding}"
        print(wrap_hanging(line, 5, sys.stdout), flush=True)
        return passed

    def _load(self) -> str:
        from rwkv.model.base import n_parameters
        from rwkv.pretrained import open_checkpoint

        options = self._options
        opened = open_checkpoint(SavedModelConfig(
            checkpoint=str(self._path), tokenizer=options.tokenizer, device=options.device, dtype=options.dtype,
            kernel=KernelConfig(name=options.kernel)), "--tokenizer")
        self._device = opened.device
        self._dtype = opened.dtype
        self._tokenizer = opened.tokenizer
        self._model = opened.model()
        self._n = n_parameters(opened.checkpoint.config, opened.checkpoint.vocab_size)
        self._ids = self._tokenizer.encode(PROMPT)
        return f"{self._model.generation.NAME}, {self._n:,} parameters, {opened.wkv.name} on {self._device}"

    def _read(self) -> str:
        """Compares prefilling the whole prompt with prefilling one token at a time."""
        import torch

        ids = torch.tensor([self._ids], device=self._device)
        whole, _ = self._model(ids)
        state = None
        for token in ids.split(1, dim=1):
            last, state = self._model(token, state)
        return self._require_close(last[:, -1].float(), whole[:, -1].float(), "token by token", "at once")

    def _compare(self) -> str:
        """Compares the prompt's last logits with the reference's."""
        import torch

        from rwkv.pretrained import RWKV

        reference = RWKV.from_pretrained(self._path, "reference", "cpu", "float32")
        expected, _ = reference(torch.tensor([self._ids]))
        logits, _ = self._model(torch.tensor([self._ids], device=self._device))
        return self._require_close(logits[:, -1].float().cpu(), expected[:, -1], self._options.kernel, "reference")

    def _require_close(self, logits: "Tensor", expected: "Tensor", name: str, reference: str) -> str:
        if not logits.isfinite().all():
            raise ArithmeticError(f"the logits of {name} are not finite")
        difference = float((logits - expected).abs().max() / expected.std())
        allowed = TOLERANCE[self._dtype]
        if not difference <= allowed:
            raise ArithmeticError(f"{name} and {reference} differ by {difference:.2g} standard deviations of the logits; "
                                  f"the limit is {allowed:g}")
        return f"{name} and {reference} differ by {difference:.1g} standard deviations of the logits"

    def _generate(self) -> str:
        from rwkv.generation.engine import generate

        texts = ["".join(generate(self._model, self._tokenizer, PROMPT, TOKENS, seed=1)) for _ in range(2)]
        if texts[0] != texts[1]:
            raise ArithmeticError(f"the same seed generated two different texts, {texts[0]!r} and {texts[1]!r}")
        return f"{texts[0]!r}"

    def _train(self) -> str:
        import torch

        from rwkv.pretrained import RWKV

        is_small = self._n <= TRAINABLE and self._options.dtype == "float32"
        path = self._path if is_small else _tiny(self._model.config.generation, self._folder)
        model = RWKV.from_pretrained(path, self._options.kernel, self._device, trainable=True)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(min(256, model.vocab_size), (2, 65), generator=generator).to(self._device)
        optimiser = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        losses = []
        for _ in range(3):               # the third loss is computed after two steps
            logits, _ = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            losses.append(loss.item())
            if len(losses) == 3:
                break
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        if not losses[2] < losses[0]:
            raise ArithmeticError(f"the loss did not decrease in two steps on one batch: it was "
                                  f"{losses[0]:.4f}, then {losses[2]:.4f}")
        return f"the loss of one batch went from {losses[0]:.3f} to {losses[2]:.3f}" + ("" if is_small else f" ({path.name})")


if __name__ == "__main__":
    sys.exit(main())
