"""Writes adapters with PEFT itself: for each entry of `KINDS`, a directory KIND, and KIND.pth with the merged weights.

    python -I peft_writer.py BASE.pth FOLDER

The model consists of the linear layers of BASE.pth's blocks, as in training/tuning/peft_reader.py. The script runs in the
environment of `make peers` and imports nothing of this repository, because `rwkv` is another package there.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, MissConfig, get_peft_model
from torch import Tensor, nn

TARGETS = ["att.key", "att.receptance", "ffn.value"]
KINDS = {
    "lora": LoraConfig(r=2, lora_alpha=5, target_modules=TARGETS),
    "rslora": LoraConfig(r=2, lora_alpha=5, target_modules=TARGETS, use_rslora=True),
    "patterns": LoraConfig(r=2, lora_alpha=5, target_modules=TARGETS, rank_pattern={"att.key": 4, "blocks.1.ffn.value": 3},
                           alpha_pattern={"key": 7, r"blocks\.2\.ffn\.value": 9}),
    "dora": LoraConfig(r=2, lora_alpha=5, target_modules=TARGETS, use_dora=True),
    "pissa": LoraConfig(r=2, lora_alpha=5, target_modules=TARGETS, init_lora_weights="pissa"),
    "miss": MissConfig(r=3, target_modules=TARGETS),
    "mini": MissConfig(r=4, mini_r=2, target_modules=TARGETS, init_weights="mini"),
    "bat": MissConfig(r=4, target_modules=TARGETS, init_weights="bat")}


def linear_layers_of(weights: dict[str, Tensor]) -> nn.Module:
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
            layer.weight = nn.Parameter(weight.float().clone())
            parent.add_module(last, layer)
    return model


def main(base: str, folder: str) -> None:
    for kind, config in KINDS.items():
        torch.manual_seed(0)
        model = get_peft_model(linear_layers_of(torch.load(base, weights_only=True)), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name or "miss_" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(str(Path(folder) / kind))
        torch.save(model.merge_and_unload().state_dict(), Path(folder) / f"{kind}.pth")


if __name__ == "__main__":
    main(*sys.argv[1:])
