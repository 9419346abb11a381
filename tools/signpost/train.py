"""Train signpost from scratch, on one CPU core, in four stages.

    python -m tools.signpost.train letters --minutes 15 --state run/letters.pt
    python -m tools.signpost.train scenes --minutes 26 --start run/letters.pt --state run/scenes.pt
    python -m tools.signpost.train answers --minutes 50 --start run/scenes.pt --state run/answers.pt
    python -m tools.signpost.train reading --minutes 27 --two-share 0.25 --start run/answers.pt \\
        --state run/reading.pt --folder signpost

`letters` trains the vision tower alone to name the character at each patch of pictures full of text; `scenes` adds
crowded sign scenes, with circles, shapes and colours to name; `answers` trains the whole model on conversations,
with the same labels at the patches beside the answers; `reading` goes on with more small type and more questions
about the text while the learning rate falls. Trained on answers from the start, a model of this size does not learn
to read within the hour.

A stage lasts for `--minutes`, or, to repeat a run whatever the machine's speed, for `--steps`, which its log names.
Another process draws the pictures; none is shown twice. The model card says how the bundled weights were made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from tools.signpost import data, scenes
from tools.signpost.batched import BatchedForward
from tools.signpost.data import Conversations, Encoder, PatchBatch
from tools.signpost.model import make_model, make_tokenizer, save_folder

_LABEL_WEIGHTS = {"character": 1.0, "second": 0.3, "index": 0.5, "circles": 0.7, "shape": 0.5, "colour": 0.3}


@dataclass(frozen=True)
class Stage:
    """What a stage trains on, and how."""

    dense_share: float
    learning_rate: float
    tower_scale: float
    decay_share: float
    answers: bool
    end_scale: float = 0.02
    small_type_share: float = 0.0


STAGES = {
    "letters": Stage(dense_share=1.0, learning_rate=2e-3, tower_scale=1.0, decay_share=0.3, answers=False),
    "scenes": Stage(dense_share=0.6, learning_rate=2e-3, tower_scale=1.0, decay_share=0.4, answers=False),
    "answers": Stage(
        dense_share=0.0,
        learning_rate=1.5e-3,
        tower_scale=0.5,
        decay_share=0.27,
        end_scale=0.63,
        answers=True,
    ),
    "reading": Stage(
        dense_share=0.0,
        learning_rate=1e-3,
        tower_scale=0.7,
        decay_share=1.0,
        answers=True,
        small_type_share=0.5,
    ),
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to train")
    parser.add_argument("--steps", type=int, default=0, help="how many steps to train, in place of --minutes")
    parser.add_argument("--seed", type=int, default=0, help="of fresh weights and of the pictures")
    parser.add_argument("--start", type=Path, help="an earlier stage's state (.pt)")
    parser.add_argument("--state", type=Path, required=True, help="where to write the state; its log lies beside it")
    parser.add_argument("--folder", type=Path, help="where to write the finished model")
    parser.add_argument("--batch", type=int, default=40, help="conversations in a batch of the answers stage")
    parser.add_argument("--patches", type=int, default=2304, help="patches in a batch of the other stages")
    parser.add_argument("--two-share", type=float, default=0.15, help="share of the batches with two pictures")
    parser.add_argument("--follow-up-share", type=float, default=0.2, help="share of the batches with follow-ups")
    parser.add_argument("--every", type=float, default=4.0, help="minutes between saved states")
    return parser.parse_args()


def produce(queue: Queue[PatchBatch | Conversations], arguments: argparse.Namespace) -> None:
    """Draw batches without end."""
    torch.set_num_threads(1)
    rng, stage = random.Random(f"{arguments.stage} {arguments.seed}"), STAGES[arguments.stage]
    encoder = Encoder(make_tokenizer())
    while True:
        if stage.answers:
            shares = arguments.two_share, arguments.follow_up_share, stage.small_type_share
            queue.put(data.training_conversations(rng, encoder, arguments.batch, *shares))
        elif rng.random() < stage.dense_share:
            queue.put(data.dense_patches(rng, arguments.patches))
        else:
            queue.put(data.crowded_patches(rng, arguments.patches))


class Trainer:
    """The model, the patch heads that go with it in training, and their optimisers."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, heads: torch.nn.ModuleDict, stage: Stage) -> None:
        self.model, self.heads, self.stage = model, heads, stage
        self.forward = BatchedForward(model)
        named = [(name, p) for name, p in model.named_parameters() if stage.answers or _in_tower(name)]
        self.parameters = [parameter for _, parameter in named] + list(heads.parameters())
        self.optimisers = self._make_optimisers(named)

    def _make_optimisers(self, named: list[tuple[str, torch.nn.Parameter]]) -> list[torch.optim.Optimizer]:
        """Muon for the matrices; AdamW for embeddings, norms, biases, the patch convolution and the heads."""
        rate = self.stage.learning_rate
        groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for name, parameter in named:
            if parameter.ndim == 2 and "embed_tokens" not in name:
                groups[_in_tower(name)].append(parameter)
        chosen = {id(parameter) for group in groups.values() for parameter in group}
        rest = [parameter for parameter in self.parameters if id(parameter) not in chosen]
        adamw = [
            {"params": [parameter for parameter in rest if parameter.ndim >= 2], "weight_decay": 0.02},
            {"params": [parameter for parameter in rest if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                group,
                lr=rate * (self.stage.tower_scale if in_tower else 1.0),
                weight_decay=0.05,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
            for in_tower, group in groups.items()
            if group
        ]
        optimisers.append(torch.optim.AdamW(adamw, lr=rate, betas=(0.9, 0.98), fused=True))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["full_rate"] = group["lr"]
        return optimisers

    def step(self, batch: PatchBatch | Conversations, scale: float) -> dict[str, float]:
        """Take one step at a share of the full learning rate; give what happened."""
        seen: dict[str, float] = {}
        if isinstance(batch, PatchBatch):
            _, states = self.forward.vision(data.normalise(batch.patches), batch.size)
            loss = self._patch_loss([batch], [states], seen)
        else:
            loss = self._answer_loss(batch, seen)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["full_rate"] * scale
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        return seen

    def _patch_loss(self, batches: list[PatchBatch], states: list[Tensor], seen: dict[str, float]) -> Tensor:
        """Cross entropy of the patch labels; patches with something and with nothing weigh the same."""
        total = torch.zeros(())
        flat = torch.cat([each.flatten(0, 1) for each in states])
        for name, weight in _LABEL_WEIGHTS.items():
            labels = torch.cat([torch.from_numpy(batch.labels[name]).flatten() for batch in batches])
            head: Any = self.heads[name]
            scores = F.linear(flat, head.weight.to(flat.dtype), head.bias.to(flat.dtype)).float()
            losses, full = F.cross_entropy(scores, labels, reduction="none"), labels > 0
            if full.any():
                total = total + weight * 0.5 * losses[full].mean()
                seen[f"patch {name}"] = (scores.detach().argmax(-1) == labels)[full].float().mean().item()
            total = total + weight * 0.5 * losses[~full].mean()
        return total

    def logits(self, batch: Conversations) -> tuple[Tensor, list[Tensor]]:
        """Scores at the positions that predict answers, [answer tokens, vocabulary], and the patch states."""
        embedding, parts, states, end = self.forward.embedding, [], [], 0
        ids = torch.from_numpy(batch.ids)
        for picture, start in zip(batch.pictures, batch.starts, strict=True):
            tokens, patch_states = self.forward.vision(data.normalise(picture.patches), picture.size)
            parts += [F.embedding(ids[:, end:start], embedding), tokens]
            states.append(patch_states)
            end = start + tokens.shape[1]
        x = torch.cat([*parts, F.embedding(ids[:, end:], embedding)], 1)
        mask = data.attention_mask(torch.from_numpy(batch.segments), x.dtype)
        hidden = self.forward.text(x, torch.from_numpy(batch.positions), mask)
        return (hidden[torch.from_numpy(batch.targets) >= 0] @ embedding.T).float(), states

    def _answer_loss(self, batch: Conversations, seen: dict[str, float]) -> Tensor:
        scores, states = self.logits(batch)
        targets = torch.from_numpy(batch.targets)
        wanted = targets >= 0
        losses = F.cross_entropy(scores, targets[wanted], reduction="none")
        kinds = torch.from_numpy(batch.kinds)[wanted]
        for index, name in enumerate(scenes.KINDS):
            if (kinds == index).any():
                seen[name] = losses.detach()[kinds == index].mean().item()
        return losses.mean() + self._patch_loss(batch.pictures, states, seen)


def _in_tower(name: str) -> bool:
    return "visual." in name and "merger.mlp" not in name


def start_model(
    start: Path | None, tokenizer: PreTrainedTokenizerFast, seed: int
) -> tuple[Qwen2_5_VLForConditionalGeneration, torch.nn.ModuleDict]:
    """Return fresh weights, or those of an earlier stage."""
    model = make_model(tokenizer, seed)
    width = model.config.vision_config.hidden_size
    heads = torch.nn.ModuleDict({name: torch.nn.Linear(width, classes) for name, classes in data.LABELS.items()})
    if start is not None:
        state = torch.load(start, weights_only=True)
        model.load_state_dict(state["model"])
        heads.load_state_dict(state["heads"])
    return model, heads


def save_state(trainer: Trainer, path: Path) -> None:
    """Write the weights so that an interruption never leaves half a file."""
    partial = path.with_suffix(".partial")
    torch.save({"model": trainer.model.state_dict(), "heads": trainer.heads.state_dict()}, partial)
    os.replace(partial, path)


def rate_scale(step: int, progress: float, stage: Stage) -> float:
    """Warm up over 50 steps; fall linearly to the stage's end over its last share."""
    left = min(1.0, (1 - progress) / stage.decay_share)
    return min(1.0, (step + 1) / 50) * (stage.end_scale + (1 - stage.end_scale) * left)


def run_stage(arguments: argparse.Namespace, trainer: Trainer, batches: Iterator[PatchBatch | Conversations]) -> None:
    """Train until the time or the steps are over."""
    log = arguments.state.with_suffix(".jsonl").open("a")

    def note(**values: Any) -> None:
        line = json.dumps(values)
        print(line, flush=True)
        print(line, file=log, flush=True)

    begin, step, pictures, due = time.monotonic(), 0, 0, arguments.every
    seen: dict[str, list[float]] = defaultdict(list)
    while True:
        minutes = (time.monotonic() - begin) / 60
        progress = step / arguments.steps if arguments.steps else minutes / arguments.minutes
        if step % 100 == 0 and seen:
            means = {name: round(sum(values) / len(values), 4) for name, values in seen.items()}
            note(step=step, minutes=round(minutes, 2), pictures=pictures, **means)
            seen.clear()
        if minutes >= due or progress >= 1:
            due += arguments.every
            save_state(trainer, arguments.state)
        if progress >= 1:
            return
        batch = next(batches)
        for name, value in trainer.step(batch, rate_scale(step, progress, trainer.stage)).items():
            seen[name].append(value)
        pictures += len(batch.patches) if isinstance(batch, PatchBatch) else len(batch.ids) * len(batch.pictures)
        step += 1


def main() -> None:
    """Run one stage."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    stage = STAGES[arguments.stage]
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    trainer = Trainer(*start_model(arguments.start, tokenizer, arguments.seed), stage)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(12)
    drawer = context.Process(target=produce, args=(queue, arguments), daemon=True)
    drawer.start()
    try:
        run_stage(arguments, trainer, iter(queue.get, None))
    finally:
        drawer.terminate()
    if arguments.folder:
        save_folder(trainer.model, tokenizer, arguments.folder)


if __name__ == "__main__":
    main()
