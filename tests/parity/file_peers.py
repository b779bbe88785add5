"""Runs programs that write or read files, in the environment that has their packages: python -I file_peers.py JOBS.json

A job names a program, what the program does ("logits" or "save"), the model, and the file for the result; "logits" also needs
the tokens (.npy, (T,)). If a job fails, the reason is written to the result's path with the suffix .failed, and the other jobs
are run. This file imports none of our packages, because `rwkv` is another package in these environments.
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

FAILED, DONE = ".failed", ".done"        # suffixes of the files that record failures and finished jobs
DEMO, DEMO_ENDS = "RWKV-v7/rwkv_v7a_demo.py", "# RWKV Tokenizer (slow version)"
# Replacements in the author's demo, which is for a GPU, to run on a CPU in float32
ON_A_CPU = (("torch.jit.ScriptModule", "nn.Module"), ("torch.jit.script_method", "(lambda f: f)"),
            ("torch.jit.script\n", "(lambda f: f)\n"), ("DTYPE = torch.half", "DTYPE = torch.float"),
            ("'cuda'", "'cpu'"), ('"cuda"', '"cpu"'), ("\nload(", "\n(lambda *a, **b: None)("))


class Package7:
    """PyPI's `rwkv`, which reads an official .pth. Requires RWKV_V7_ON=1."""

    def logits(self, model: Path, tokens: ndarray, job: dict[str, Any]) -> ndarray:
        import torch
        from peers import RwkvPackage7

        read = RwkvPackage7(model)
        states = [(name, tensor) for name, tensor in torch.load(model).items() if name.endswith(".att.time_state")]
        if not states:
            return read.row(tokens, None)[0]
        _, begin = read.row(tokens[:1], None)            # a state in the package's format
        begin = [torch.zeros_like(part) for part in begin]
        for layer, (_, tensor) in enumerate(states):
            begin[3 * layer + 1] = tensor.float()
        return read.row(tokens, begin)[0]


class LlamaCpp:
    """llama.cpp through llama-cpp-python. Reads a GGUF file, and saves it in the type that the job names."""

    def logits(self, model: Path, tokens: ndarray, job: dict[str, Any]) -> ndarray:
        from peers import LlamaCpp as Reader

        return Reader(model).row(tokens, None)[0]

    def save(self, model: Path, to: str, job: dict[str, Any]) -> None:
        from peers import LlamaCpp as Writer

        Writer(model).save(to, job["type"])


def logits_of(kind: Any, model: Path, tokens: ndarray) -> ndarray:
    """Returns the logits of a model class of transformers, or of a class with the same interface."""
    import torch

    loaded = kind.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: ndarray = loaded(torch.tensor(tokens)[None]).logits[0].numpy()
    return logits


class Rwkv7Hf:
    """rwkv7-hf. Its converter makes a directory from an official .pth; its model reads such directories and fla's."""

    def logits(self, model: Path, tokens: ndarray, job: dict[str, Any]) -> ndarray:
        from rwkv7_hf.modeling_rwkv7 import RWKV7ForCausalLM

        return logits_of(RWKV7ForCausalLM, model, tokens)

    def save(self, model: Path, to: str, job: dict[str, Any]) -> None:
        from rwkv7_hf.converter import build_parser, convert

        convert(build_parser().parse_args(["--input", str(model), "--output", to, "--precision", "fp32",
                                           "--max-shard-size", job.get("shard", "1000GB")]))


class Fla:
    """flash-linear-attention. Reads and saves a directory, but computes nothing, because its layers are Triton kernels."""

    def save(self, model: Path, to: str, job: dict[str, Any]) -> None:
        from fla.models.rwkv7 import RWKV7ForCausalLM

        RWKV7ForCausalLM.from_pretrained(model).save_pretrained(to)


class Transformers:
    """transformers with its own models/rwkv7, which is in no release. Reads an official directory."""

    def logits(self, model: Path, tokens: ndarray, job: dict[str, Any]) -> ndarray:
        from transformers import Rwkv7ForCausalLM

        return logits_of(Rwkv7ForCausalLM, model, tokens)


class Peft:
    """PEFT. Saves an adapter of each kind, and the weights with the adapter merged as merged-KIND.pth."""

    def save(self, model: Path, to: str, job: dict[str, Any]) -> None:
        import torch
        from peft import LoraConfig, MissConfig, get_peft_model
        from peft_writer import linear_layers_of

        targets = ["att.key", "att.receptance", "ffn.value"]
        lora: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": targets}
        kinds = {"lora": LoraConfig(**lora), "rslora": LoraConfig(**lora, use_rslora=True),
                 "dora": LoraConfig(**lora, use_dora=True), "pissa": LoraConfig(**lora, init_lora_weights="pissa"),
                 "miss": MissConfig(r=4, target_modules=targets)}
        weights = torch.load(model)
        for kind, config in kinds.items():
            torch.manual_seed(0)
            adapted = get_peft_model(linear_layers_of(weights), config)
            with torch.no_grad():
                for name, parameter in adapted.named_parameters():
                    if "lora_" in name or "miss_" in name:
                        parameter.add_(0.02 * torch.randn_like(parameter))
            adapted.save_pretrained(str(Path(to) / kind))
            merged = adapted.merge_and_unload().state_dict()
            torch.save({**weights, **merged}, Path(to) / f"merged-{kind}.pth")


class Demo7a:
    """The author's demo of RWKV-7a. Its model in RWKV-LM reads token by token, on a CPU instead of a GPU."""

    def logits(self, model: Path, tokens: ndarray, job: dict[str, Any]) -> ndarray:
        import torch

        source = (Path(job["rwkv_lm"]) / DEMO).read_text(encoding="utf-8").partition(DEMO_ENDS)[0]
        for old, new in ON_A_CPU:
            source = source.replace(old, new)
        demo: dict[str, Any] = {}
        exec(compile(source, DEMO, "exec"), demo)
        weights = torch.load(model)
        V, C = weights["emb.weight"].shape
        arguments = demo["args"]
        arguments.MODEL_NAME, arguments.vocab_size, arguments.n_embd = str(model.with_suffix("")), V, C
        arguments.n_layer = sum(name.endswith("ln1.weight") for name in weights)
        arguments.head_size = weights["blocks.0.att.r_k"].shape[1]
        loaded, state, logits_of_tokens = demo["RWKV_x070"](arguments), None, []
        for token in tokens.tolist():
            logits, state = loaded.forward([token], state)
            logits_of_tokens.append(logits.numpy())
        return np.stack(logits_of_tokens)


PROGRAMS = {"rwkv": Package7, "llama.cpp": LlamaCpp, "rwkv7-hf": Rwkv7Hf, "fla": Fla, "transformers": Transformers,
            "peft": Peft, "RWKV-LM": Demo7a}


def work(job: dict[str, Any]) -> None:
    program, model, result = PROGRAMS[job["program"]](), Path(job["model"]), job["result"]
    try:
        if job["do"] == "save":
            program.save(model, result, job)     # type: ignore[attr-defined]
        else:
            np.save(result, program.logits(model, np.load(job["tokens"]), job))          # type: ignore[attr-defined]
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        Path(result + FAILED).write_text(f"{reason}\n\n{traceback.format_exc()}", encoding="utf-8")


if __name__ == "__main__":
    here = Path(__file__).parent
    sys.path += [str(here), str(here.parent / "checkpoint")]     # peers.py and peft_writer.py are not on the path with -I
    for each in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        with contextlib.redirect_stdout(sys.stderr):
            work(each)
        Path(each["result"] + DONE).touch()
