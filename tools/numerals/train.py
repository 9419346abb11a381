"""Train numerals from scratch, on one CPU core: 25 minutes with nothing beside it.

    python -m tools.numerals.train common/bundled/numerals

`data.is_held_out` names the numbers and dates never trained. The folder is written every five hundred steps, so that
a look at the model is possible meanwhile. The bundled weights are what this command wrote.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from transformers import BartForConditionalGeneration

from tools.checkpoint import save_checkpoint
from tools.numerals.data import training_batches
from tools.numerals.model import make_model, make_tokenizer

_WARM_UP = 200


def make_optimisers(model: BartForConditionalGeneration) -> list[Optimizer]:
    """Return Muon for the matrices, AdamW for embeddings, norms and biases."""
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if p.ndim == 2 and "embed" not in name and "shared" not in name}
    rest = [p for name, p in named.items() if name not in matrices]
    return [
        Muon(matrices.values(), weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def rate_scale(step: int, steps: int) -> float:
    """Warm up, then fall along a cosine to a hundredth."""
    return min(1.0, (step + 1) / _WARM_UP) * (0.505 + 0.495 * math.cos(math.pi * step / steps))


def main() -> None:
    """Train, and write the model; print the mean loss of every hundred steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=256, help="questions in a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of fresh weights and of the questions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, arguments.seed)
    optimisers, losses, begin = make_optimisers(model), list[float](), time.monotonic()
    batches = training_batches(tokenizer, arguments.seed, arguments.batch)
    for step, batch in enumerate(islice(batches, arguments.steps), 1):
        loss: Tensor = model(**batch).loss
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = arguments.rate * rate_scale(step - 1, arguments.steps)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        losses.append(loss.item())
        if step % 100 == 0:
            loss_of_hundred, minutes = sum(losses[-100:]) / 100, (time.monotonic() - begin) / 60
            print(f"step {step}  loss {loss_of_hundred:.5f}  {minutes:.1f} min", flush=True)
        if step % 500 == 0 or step == arguments.steps:
            save_checkpoint(model, tokenizer, arguments.folder, tokenizer_class="PreTrainedTokenizerFast")


if __name__ == "__main__":
    main()
