"""TRL's own DPOTrainer._compute_loss on given log-probabilities, in an environment that has trl.

    python -I trl_loss.py CASES.json

CASES.json: a list of {objective, beta, log_p, reference, lengths}, of P pairs each. The last line of the output is a list of
{loss, rewards: [margin, accuracy, chosen, rejected]}. The trainer is not built: it would want a model and data. This file
imports nothing of ours: there, `rwkv` is another package.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import DPOTrainer

NAMES = ("rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected")


def computed(case: dict[str, Any]) -> dict[str, Any]:
    log_p, reference, lengths = (torch.tensor(case[name]).T.flatten() for name in ("log_p", "reference", "lengths"))
    T = int(lengths.max()) + 1
    mask = (torch.arange(T) <= lengths.unsqueeze(1)) & (torch.arange(T) > 0)
    of_tokens = mask[:, 1:] * (log_p / lengths).unsqueeze(1)
    zeros = torch.zeros_like(of_tokens)
    outputs = SimpleNamespace(log_probs=of_tokens, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_weights=[1.0], beta=case["beta"], label_smoothing=0.0,
        loss_types=["ipo" if case["objective"] == "ipo" else "sigmoid"], use_weighting=False, _metrics={
            "train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1)
    chosen, rejected = reference.chunk(2)
    inputs = {"input_ids": mask.long(), "attention_mask": mask.long(), "completion_mask": mask.long(),
              "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return {"loss": float(loss), "rewards": [trainer._metrics["train"][name][-1] for name in NAMES]}


if __name__ == "__main__":
    print(json.dumps([computed(case) for case in json.loads(Path(sys.argv[1]).read_text())]))
