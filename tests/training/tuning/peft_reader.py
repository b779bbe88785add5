"""PEFT's own reader of an adapter's directory, in the peers' environment: it adds the adapters to a model and merges them.

    python -I peft_reader.py BASE.pth ADAPTER_DIRECTORY MERGED.pth

The model is the linear layers of BASE.pth's blocks, by their names there; MERGED.pth gets their weights after the merge. A
tensor of the adapter's file that the model lacks, or the other way round, ends the program. This file imports nothing of ours:
there, `rwkv` is another package.
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn


def skeleton(weights: dict[str, Tensor]) -> nn.Module:
    """nn.Linear for each blocks.i.att.name.weight and blocks.i.ffn.name.weight of two dimensions, inside plain modules."""
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
    model = PeftModel.from_pretrained(skeleton(torch.load(base, weights_only=True)), adapter)
    held = {name.replace(".default.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    stored = load_file(Path(adapter) / "adapter_model.safetensors")
    if held.keys() != stored.keys():
        sys.exit(f"the model and the file differ in {sorted(held.keys() ^ stored.keys())[:4]}")
    for name, tensor in stored.items():
        if not torch.equal(held[name], tensor):
            sys.exit(f"{name} was not read")
    torch.save(model.merge_and_unload().state_dict(), merged)


if __name__ == "__main__":
    main(*sys.argv[1:])
