"""Training batches: patches with labels for the vision tower, and conversations about pictures."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.signpost import scenes
from tools.signpost.model import PLACED_QUESTIONS, PLACES, PREPROCESSOR
from tools.signpost.scenes import KINDS, QUESTIONS, Scene, Split

PATCH = 14
IGNORED = -100
SMALL_TYPE = 18
LABELS = {"character": 37, "second": 37, "index": 5, "circles": 4, "shape": 5, "colour": 9}
"""What is predicted at each patch, and how many classes it has; class 0 is 'nothing here'."""

_CLASS_OF = {char: index + 1 for index, char in enumerate(scenes.CHARACTERS)}
_DENSE_SIZES = ((56, 56), (84, 56), (84, 84), (112, 56), (112, 84), (140, 112))
_SMALL_SIZES = ((84, 56), (112, 56), (84, 84), (112, 84))
PADDING = 99
"""The segment of the filler at the end of a shorter sequence."""


@dataclass
class PatchBatch:
    """Pictures of one size with labels at their patches.

    Attributes:
        patches: [pictures, patches, 588], uint8, in the order in which the model merges them.
        labels: by name, [pictures, patches].
    """

    size: tuple[int, int]
    patches: NDArray[np.uint8]
    labels: dict[str, NDArray[np.int64]]


@dataclass
class Conversations:
    """Conversations of one layout: the same number of pictures, of the same sizes, at the same places.

    Attributes:
        pictures: one batch for each place in the prompt.
        starts: where each picture's tokens start.
        ids, segments, targets, kinds: [sequences, length]; targets are shifted by one, kinds index `KINDS`.
        positions: [3, sequences, length].
    """

    pictures: list[PatchBatch]
    starts: list[int]
    ids: NDArray[np.int64]
    segments: NDArray[np.int64]
    targets: NDArray[np.int64]
    kinds: NDArray[np.int64]
    positions: NDArray[np.int64]


def to_patches(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[pictures, height, width, 3] to [pictures, patches, 588]: blocks of 2 x 2 patches stay together."""
    count, height, width, _ = images.shape
    rows, columns = height // PATCH, width // PATCH
    split = images.reshape(count, rows // 2, 2, PATCH, columns // 2, 2, PATCH, 3).transpose(0, 1, 4, 2, 5, 7, 3, 6)
    return split.reshape(count, rows * columns, 3 * PATCH * PATCH)


def normalise(patches: NDArray[np.uint8]) -> Tensor:
    """Pixel values as the image processor gives them."""
    mean, deviation = (torch.tensor(PREPROCESSOR[key])[:, None] * 255 for key in ("image_mean", "image_std"))
    x = torch.from_numpy(patches).view(*patches.shape[:2], 3, PATCH * PATCH).float()
    return ((x - mean) / deviation).flatten(2)


def patch_index(x: float, y: float, size: tuple[int, int]) -> int | None:
    """Which patch a point lies in; None outside the picture."""
    if not (0 <= x < size[0] and 0 <= y < size[1]):
        return None
    column, row = int(x // PATCH), int(y // PATCH)
    return ((row // 2) * (size[0] // PATCH // 2) + column // 2) * 4 + (row % 2) * 2 + column % 2


def patch_centres(size: tuple[int, int]) -> NDArray[np.float64]:
    """[patches, 2]: x and y of the patches' centres."""
    rows, columns = size[1] // PATCH // 2, size[0] // PATCH // 2
    centres = [
        ((column * 2 + right) * PATCH + PATCH / 2, (row * 2 + down) * PATCH + PATCH / 2)
        for row in range(rows)
        for column in range(columns)
        for down in (0, 1)
        for right in (0, 1)
    ]
    return np.array(centres)


def _empty_labels(size: tuple[int, int]) -> dict[str, NDArray[np.int64]]:
    return {name: np.zeros(size[0] * size[1] // PATCH**2, np.int64) for name in LABELS}


def _mark_character(
    labels: dict[str, NDArray[np.int64]], size: tuple[int, int], char: str, index: int, x: float, y: float
) -> None:
    patch = patch_index(x, y, size)
    if patch is None:
        return
    if labels["character"][patch] == 0:
        labels["character"][patch], labels["index"][patch] = _CLASS_OF[char], index + 1
    elif labels["second"][patch] == 0:
        labels["second"][patch] = _CLASS_OF[char]


def label_scene(scene: Scene) -> dict[str, NDArray[np.int64]]:
    """What is at each patch of a scene."""
    size = scene.image.size
    labels = _empty_labels(size)
    for index, (char, x, y) in enumerate(scene.characters):
        _mark_character(labels, size, char, index, x, y)
    for x, y in scene.circles:
        patch = patch_index(x, y, size)
        if patch is not None:
            labels["circles"][patch] = min(3, labels["circles"][patch] + 1)
    left, top, right, bottom = scene.sign_box
    x, y = patch_centres(size).T
    on_sign = (x > left - 4) & (x < right + 4) & (y > top - 4) & (y < bottom + 4)
    labels["shape"][on_sign] = 1 + scenes.SHAPES.index(scene.answers["shape"])
    labels["colour"][on_sign] = 1 + list(scenes.COLOURS).index(scene.answers["colour"])
    return labels


def _gather(size: tuple[int, int], images: list[Image.Image], labels: list[dict[str, NDArray[np.int64]]]) -> PatchBatch:
    pixels = np.stack([np.asarray(image) for image in images])
    return PatchBatch(size, to_patches(pixels), {name: np.stack([each[name] for each in labels]) for name in LABELS})


def scene_patches(drawn: list[Scene]) -> PatchBatch:
    """Scenes of one size as patches with labels."""
    return _gather(drawn[0].image.size, [scene.image for scene in drawn], [label_scene(scene) for scene in drawn])


def dense_patches(rng: random.Random, patches: int) -> PatchBatch:
    """Pictures full of lines of text, for about this many patches in all."""
    size = rng.choice(_DENSE_SIZES)
    drawn = [_draw_dense(rng, size) for _ in range(max(4, patches * PATCH**2 // (size[0] * size[1])))]
    return _gather(size, [image for image, _ in drawn], [labels for _, labels in drawn])


def crowded_patches(rng: random.Random, patches: int) -> PatchBatch:
    """Sign scenes with many circles and other things."""
    size = rng.choice(scenes.SIZES)
    count = max(4, patches * PATCH**2 // (size[0] * size[1]))
    return scene_patches([scenes.render(rng, size, max_circles=8, max_others=5) for _ in range(count)])


def _draw_dense(rng: random.Random, size: tuple[int, int]) -> tuple[Image.Image, dict[str, NDArray[np.int64]]]:
    width, height = size
    image = Image.new("RGB", size, scenes.jitter(rng, rng.choice(scenes.BACKGROUNDS), 10))
    draw = ImageDraw.Draw(image)
    angle = rng.uniform(-scenes.MAX_ANGLE, scenes.MAX_ANGLE) if rng.random() < 0.7 else 0.0
    characters: list[tuple[str, int, float, float]] = []
    y = float(rng.randint(-4, 4))
    while y < height - 8:
        y = _draw_line(rng, draw, y, width, characters)
    image = image.rotate(angle, resample=Image.Resampling.BICUBIC, fillcolor=image.getpixel((0, 0)))
    labels = _empty_labels(size)
    for char, index, x, y in characters:
        dx, dy = scenes.rotate_point((x - width / 2, y - height / 2), angle)
        if 5 <= dy + height / 2 < height - 5 and 4 <= dx + width / 2 < width - 4:
            _mark_character(labels, size, char, index, dx + width / 2, dy + height / 2)
    return scenes.add_noise(rng, image) if rng.random() < 0.5 else image, labels


def _draw_line(
    rng: random.Random,
    draw: ImageDraw.ImageDraw,
    y: float,
    width: int,
    characters: list[tuple[str, int, float, float]],
) -> float:
    """Draw one coloured strip with words; give where the next one starts."""
    colour, face = rng.choice(list(scenes.COLOURS)), rng.choice(scenes.FACES)
    size = rng.randint(scenes.MIN_TYPE, scenes.MAX_TYPE - 4)
    tall = -face.font(size).getbbox("H", anchor="ls")[1]
    bottom = y + tall + rng.randint(4, 9)
    draw.rectangle((0, y, width, bottom), fill=scenes.jitter(rng, scenes.COLOURS[colour]))
    baseline = (y + bottom + tall) / 2
    x = float(rng.randint(-2, 10))
    while x < width - 8:
        text, _ = scenes.pick_text(rng, "train")
        spacing = rng.uniform(1.0, 2.5)
        drawn = scenes.draw_text(draw, (x, baseline), text, face, size, spacing, scenes.ink(rng, colour))
        characters += [(char, index, at_x, at_y) for index, (char, at_x, at_y) in enumerate(drawn)]
        x += scenes.text_width(face, size, text, spacing) + size * 0.5 + rng.randint(2, 12)
    return bottom + 1 + rng.randint(0, 3)


@dataclass
class _Sequence:
    ids: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    next_position: int = 0

    def add(self, ids: list[int], segment: int, kind: int = -1) -> None:
        """Append text; a kind marks it as an answer to learn."""
        self.ids += ids
        self.segments += [segment] * len(ids)
        self.targets += ids if kind >= 0 else [IGNORED] * len(ids)
        self.kinds += [kind] * len(ids)
        self.positions += [(self.next_position + step,) * 3 for step in range(len(ids))]
        self.next_position += len(ids)

    def add_picture(self, pad: int, size: tuple[int, int]) -> None:
        """Append the tokens of a picture; the next position follows its longer side."""
        columns, rows = size[0] // 28, size[1] // 28
        start = self.next_position
        self.add([pad] * (columns * rows), 0)
        grid = [(start, start + row, start + column) for row in range(rows) for column in range(columns)]
        self.positions[-len(grid) :] = grid
        self.next_position = start + max(rows, columns)


class Encoder:
    """Turns scenes and questions into token sequences, exactly as the chat template renders them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        self.pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.filler = tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def encode(self, text: str) -> list[int]:
        """A text's token ids, remembered."""
        if text not in self._cache:
            self._cache[text] = self._tokenizer(text, add_special_tokens=False).input_ids
        return self._cache[text]

    def conversations(
        self,
        rng: random.Random,
        pictures: list[list[Scene]],
        split: Split,
        follow_ups: bool,
        turns: int = 4,
        always_text: bool = False,
    ) -> Conversations:
        """Ask several questions about the pictures of each conversation.

        Args:
            rng: chooses questions and wordings; the test split always takes the first wording.
            pictures: by place in the prompt, then by conversation.
            split: train or test.
            follow_ups: True renders the questions as the turns of one conversation. False asks each on its own: the
                questions share the tokens of the pictures, see nothing of one another and have the positions that
                they would have alone.
            turns: how many questions.
            always_text: the text of every picture is among them.
        """
        groups = [list(group) for group in zip(*pictures, strict=True)]
        asked = [_pick_questions(rng, len(group), turns, always_text) for group in groups]
        built = [self._sequence(rng, *each, split, follow_ups) for each in zip(groups, asked, strict=True)]
        sizes = [group[0].image.size for group in pictures]
        starts, start = [], 0
        for place, size in enumerate(sizes):
            start += len(self._opening(place))
            starts.append(start)
            start += size[0] * size[1] // 784
        return self._pad(built, [scene_patches(group) for group in pictures], starts)

    def _opening(self, place: int) -> list[int]:
        return self.encode("<|im_start|>user\n<|vision_start|>" if place == 0 else "<|vision_end|><|vision_start|>")

    def _sequence(
        self, rng: random.Random, group: list[Scene], asked: list[tuple[int, str]], split: Split, follow_ups: bool
    ) -> _Sequence:
        sequence = _Sequence()
        for place, scene in enumerate(group):
            sequence.add(self._opening(place), 0)
            sequence.add_picture(self.pad, scene.image.size)
        sequence.add(self.encode("<|vision_end|>"), 0)
        base = sequence.next_position
        for turn, (place, kind) in enumerate(asked):
            segment = 0 if follow_ups else turn + 1
            if not follow_ups:
                sequence.next_position = base
            elif turn > 0:
                sequence.add(self.encode("\n<|im_start|>user\n"), segment)
            sequence.add(self.encode(_question(rng, kind, place, len(group), split)), segment)
            sequence.add(self.encode("<|im_end|>\n<|im_start|>assistant\n"), segment)
            answer = self.encode(group[place].answers[kind]) + self.encode("<|im_end|>")
            sequence.add(answer, segment, KINDS.index(kind))
        return sequence

    def _pad(self, built: list[_Sequence], pictures: list[PatchBatch], starts: list[int]) -> Conversations:
        count, length = len(built), -(-max(len(sequence.ids) for sequence in built) // 8) * 8
        out = Conversations(
            pictures,
            starts,
            ids=np.full((count, length), self.filler),
            segments=np.full((count, length), PADDING),
            targets=np.full((count, length), IGNORED),
            kinds=np.full((count, length), -1),
            positions=np.zeros((3, count, length), np.int64),
        )
        for row, sequence in enumerate(built):
            end = len(sequence.ids)
            out.ids[row, :end], out.segments[row, :end] = sequence.ids, sequence.segments
            out.targets[row, : end - 1], out.kinds[row, : end - 1] = sequence.targets[1:], sequence.kinds[1:]
            out.positions[:, row, :end] = np.array(sequence.positions).T
        return out


def _pick_questions(rng: random.Random, pictures: int, turns: int, always_text: bool) -> list[tuple[int, str]]:
    """Places and kinds to ask about, in random order."""
    every = [(place, kind) for place in range(pictures) for kind in KINDS]
    rng.shuffle(every)
    if always_text:
        every.sort(key=lambda question: question[1] != "text")
    return rng.sample(every[:turns], min(turns, len(every)))


def _question(rng: random.Random, kind: str, place: int, pictures: int, split: Split) -> str:
    wordings = QUESTIONS[kind] if pictures == 1 else PLACED_QUESTIONS[kind]
    wording = rng.choice(wordings) if split == "train" else wordings[0]
    return wording.format(place=PLACES[place])


def attention_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive causal mask, [sequences, 1, length, length]: a token sees segment 0 and its own."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None]
    seen = causal & ((segments[:, None] == 0) | (segments[:, None] == segments[:, :, None]))
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]


def training_conversations(
    rng: random.Random, encoder: Encoder, count: int, two_share: float, follow_up_share: float, small_share: float
) -> Conversations:
    """A batch of the training split: one picture each, or two, with separate questions or follow-ups.

    A share of the batches has small type alone. Where there is such a share, reading weighs more as well: one
    question fewer is asked, and the text always.
    """
    follow_ups = rng.random() < follow_up_share
    if rng.random() < two_share:
        sizes, count, turns = [rng.choice(_SMALL_SIZES) for _ in PLACES], count * 3 // 5, 5
    else:
        sizes, turns = [rng.choice(_SMALL_SIZES if rng.random() < 0.5 else scenes.SIZES)], 4
    max_type = SMALL_TYPE if rng.random() < small_share else scenes.MAX_TYPE
    drawn = [[scenes.render(rng, size, max_type=max_type) for _ in range(count)] for size in sizes]
    focus = small_share > 0
    return encoder.conversations(rng, drawn, "train", follow_ups, turns - focus, always_text=focus)
