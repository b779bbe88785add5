"""Reads an adapter's directory with PEFT itself, adds the adapters to a model, and writes the merged weights.

    python -I peft_reader.py BASE.pth ADAPTER_DIRECTORY MERGED.pth

The model consists of the linear layers of BASE.pth's blocks. MERGED.pth gets the merged weights of these layers. The program
fails if the adapter's file and the model do not have the same tensors. The script runs in the environment of `make peers` and
imports nothing of this repository, because `rwkv` is another package there.
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn


def linear_layers_of(weights: dict[str, Tensor]) -> nn.Module:
    """Returns an nn.Linear for each two-dimensional blocks.i.att.name.weight and blocks.i.ffn.name.weight, in plain modules."""
    model = nn.Module()
    for name, weight in weights.items():
        if name.startswith("blocks.") and name.endswith(".weight") and weight.dim() == 2:
            parent = model
            *parents, last = name.removesuffix(".weight").split(".")
            for part in parents:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight = nn.Parameter(weight.float())
            parent.add_module(last, layer)
    return model


def main(base: str, adapter: str, merged: str) -> None:
    model = PeftModel.from_pretrained(linear_layers_of(torch.load(base, weights_only=True)), adapter)
    tensors = {name.replace(".default.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    stored = load_file(Path(adapter) / "adapter_model.safetensors")
    if tensors.keys() != stored.keys():
        sys.exit(f"the model and the file differ in {sorted(tensors.keys() ^ stored.keys())[:4]}")
    for name, tensor in stored.items():
        if not torch.equal(tensors[name], tensor):
            sys.exit(f"{name} was not read")
    torch.save(model.merge_and_unload().state_dict(), merged)


if __name__ == "__main__":
    main(*sys.argv[1:])
