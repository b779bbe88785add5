"""Writes the results of tune=lora and tune=state beside the run's checkpoints, for timemix and other programs.

    adapter/adapter_model.safetensors, adapter_config.json     LoRA in the layout of the PEFT library
    state.safetensors                                          a state for state= of generate.py, to use with the frozen weights
    time_state.pth                                             the same state as blocks.i.att.time_state (H,N,N), value by key,
                                                               in RWKV-PEFT's layout (rwkvt/operator/rwkvop.py, x070)
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from rwkv.checkpoint.formats import _torch_file
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.config import TrainConfig
from rwkv.generation.prefix_cache import PrefillResult
from rwkv.generation.state_files import save_context
from rwkv.io.atomic import write_file
from rwkv.model.base import TIME_STATE, Model
from rwkv.model.lora import adapter_tensors, layers_to_adapt
from rwkv.tokenizer.tokenizers import Tokenizer


def tuned_files(config: TrainConfig, out_dir: Path) -> list[Path]:
    """Returns the paths of the files that a run with this tune.method writes at the end."""
    names = {"lora": ["adapter/adapter_model.safetensors", "adapter/adapter_config.json"],
             "state": ["state.safetensors", "time_state.pth"]}
    return [out_dir / name for name in names.get(config.tune.method, [])]


def write_tuned(model: Model, trained: Mapping[str, Tensor], tokenizer: Tokenizer, config: TrainConfig,
                out_dir: Path) -> list[Path]:
    """Writes the files and returns the paths to print. With tune=full, there are none.

    `trained` maps names to trained parameters.
    """
    if config.tune.method == "lora":
        return [_write_adapter(model, trained, config, *tuned_files(config, out_dir))]
    return _write_state(model, tokenizer, *tuned_files(config, out_dir)) if config.tune.method == "state" else []


def _write_adapter(model: Model, trained: Mapping[str, Tensor], config: TrainConfig, weights: Path,
                   description: Path) -> Path:
    tune = config.tune
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous()
               for name, tensor in adapter_tensors(trained).items()}
    settings = {"peft_type": "LORA", "r": tune.rank, "lora_alpha": tune.alpha, "lora_dropout": tune.dropout, "bias": "none",
                "target_modules": layers_to_adapt(model.config, tune.modules), "fan_in_fan_out": False, "inference_mode": True,
                "base_model_name_or_path": config.init_from}
    write_file(weights, lambda file: file.write(save(tensors, {"format": "pt"})))
    write_file(description, lambda file: file.write(json.dumps(settings, indent=2).encode() + b"\n"))
    return weights.parent


@torch.no_grad()
def _write_state(model: Model, tokenizer: Tokenizer, as_state: Path, as_pth: Path) -> list[Path]:
    # state.safetensors also holds the logits after end_of_text, for empty prompts
    first = torch.tensor([[tokenizer.end_of_text]], device=model.emb.weight.device)
    save_context(as_state, PrefillResult(model.prefill(first)[0], model.empty_state(1)), model, tokenizer)
    tensors = {f"blocks.{layer}.{TIME_STATE}": Stored.of(TIME_STATE, str(as_pth), state.detach().cpu())
               for layer, state in enumerate(model.time_states())}
    write_file(as_pth, lambda file: _torch_file.save(file, tensors))
    return [as_state, as_pth]
