"""Synthetic images: a sign with a short text on a coloured shape, among circles and other shapes.

`render` draws one image and gives the right answers to the questions about it. Only Pillow and NumPy are needed.

Two things are held out of the training split: every text whose MD5 ends on a multiple of ten (`is_held_out`), and
the colour-shape pairs in `HELD_OUT_PAIRS`. The test split shows held-out texts only, and a held-out pair in about
every fourth image.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.signpost.words import WORDS

Split = Literal["train", "test"]
Rgb = tuple[int, int, int]
Point = tuple[float, float]

KINDS = ("text", "colour", "shape", "circles")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "text": ("What does the sign say?", "Read the sign.", "What is written on the sign?"),
    "colour": ("What colour is the sign?", "What color is the sign?", "Which colour does the sign have?"),
    "shape": ("What shape is the sign?", "Which shape does the sign have?"),
    "circles": ("How many circles are there?", "Count the circles.", "How many circles do you see?"),
}

COLOURS: dict[str, Rgb] = {
    "red": (205, 30, 35),
    "green": (25, 140, 50),
    "blue": (30, 65, 200),
    "yellow": (245, 215, 30),
    "orange": (245, 130, 20),
    "purple": (125, 40, 160),
    "white": (245, 245, 245),
    "black": (22, 22, 22),
}
LIGHT_COLOURS = frozenset({"yellow", "white", "orange"})
SHAPES = ("rectangle", "oval", "hexagon", "arrow")
HELD_OUT_PAIRS = frozenset({("purple", "oval"), ("green", "hexagon"), ("yellow", "arrow"), ("black", "rectangle")})
BACKGROUNDS: tuple[Rgb, ...] = (
    (200, 225, 240),
    (222, 205, 180),
    (185, 190, 195),
    (170, 205, 165),
    (235, 200, 215),
    (140, 150, 170),
    (150, 130, 110),
)
SIZES = ((84, 56), (112, 56), (84, 84), (112, 84), (140, 84), (112, 112), (140, 112), (168, 112), (168, 140))
"""Width and height; multiples of 28, so an image takes width * height / 784 tokens."""

MAX_CIRCLES = 5
MIN_TYPE, MAX_TYPE = 14, 28
MAX_ANGLE = 4.0
CHARACTERS = string.ascii_uppercase + string.digits
TEXT_KINDS = ("word", "letters", "number", "mixed")
# I, O, 0 and 1 look alike in some faces: they stand only where the rest of the text tells them apart.
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_MIXED = _LETTERS + "23456789"
_VOWELS, _CONSONANTS = "AEIOU", "BCDFGHJKLMNPRSTVWXZ"


@dataclass(frozen=True)
class Face:
    """A bold typeface; a stroke in proportion to the size makes a regular face bold."""

    name: str
    path: str | None
    stroke: float = 0.0

    def font(self, size: int) -> ImageFont.FreeTypeFont:
        """The face at a size in pixels."""
        return _load_font(self.path, size)


@functools.cache
def _load_font(path: str | None, size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size) if path is None else ImageFont.truetype(path, size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType")
    return font


BUILT_IN = Face("built-in", None, stroke=1 / 28)
_DEJAVU = ("DejaVuSans-Bold", "DejaVuSansMono-Bold", "DejaVuSerif-Bold")
_FONT_FOLDERS = ("/usr/share/fonts/truetype/dejavu", "/usr/share/fonts/dejavu", "/usr/share/fonts/TTF")


def find_faces() -> tuple[Face, ...]:
    """Return Pillow's built-in face, and the DejaVu faces of matplotlib's data or the system's font folders."""
    folders = [Path(folder) for folder in _FONT_FOLDERS]
    spec = importlib.util.find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf")
    faces = [BUILT_IN]
    for name in _DEJAVU:
        found = [folder / f"{name}.ttf" for folder in folders if (folder / f"{name}.ttf").is_file()]
        faces += [Face(name, str(path)) for path in found[:1]]
    return tuple(faces)


FACES = find_faces()


@dataclass(frozen=True)
class Scene:
    """An image, the right answers by question kind, and where things are (for the training's per-patch labels)."""

    image: Image.Image
    answers: dict[str, str]
    text_kind: str
    face: str
    type_size: int
    unseen_pair: bool
    characters: tuple[tuple[str, float, float], ...]
    circles: tuple[Point, ...]
    sign_box: tuple[float, float, float, float]


@dataclass(frozen=True)
class _Sign:
    """A sign's layer after rotation, and the characters' centres relative to the layer's centre."""

    layer: Image.Image
    characters: tuple[tuple[str, float, float], ...]
    face: str
    type_size: int


def is_held_out(text: str) -> bool:
    """Whether a text belongs to the test split alone."""
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16) % 10 == 0


def pick_text(rng: random.Random, split: Split) -> tuple[str, str]:
    """Return a text of the split, of two to four characters, and the kind."""
    while True:
        kind = rng.choices(TEXT_KINDS, (40, 25, 20, 15))[0]
        text = _draw_text(rng, kind)
        if is_held_out(text) == (split == "test"):
            return text, kind


def _draw_text(rng: random.Random, kind: str) -> str:
    length = rng.choice((2, 3, 3, 4, 4, 4))
    if kind == "word":
        return rng.choice(WORDS) if rng.random() < 0.5 else _invent_word(rng, length)
    alphabet = {"letters": _LETTERS, "number": string.digits, "mixed": _MIXED}[kind]
    return "".join(rng.choice(alphabet) for _ in range(length))


def _invent_word(rng: random.Random, length: int) -> str:
    """Return a pronounceable string: a reader of words must not learn to guess from a list."""
    start = rng.randrange(2)
    return "".join(rng.choice(_VOWELS if (start + i) % 2 else _CONSONANTS) for i in range(length))


def jitter(rng: random.Random, colour: Rgb, amount: int = 12) -> Rgb:
    """Return a colour near the given colour."""
    red, green, blue = (max(0, min(255, value + rng.randint(-amount, amount))) for value in colour)
    return red, green, blue


def ink(rng: random.Random, colour: str) -> Rgb:
    """The colour of the text on a sign."""
    return jitter(rng, (15, 15, 15) if colour in LIGHT_COLOURS else (245, 245, 245), 10)


def text_width(face: Face, size: int, text: str, spacing: float) -> float:
    """Return the width of a text with extra spacing between characters."""
    font = face.font(size)
    return sum(font.getlength(char) for char in text) + spacing * (len(text) - 1)


def draw_text(
    draw: ImageDraw.ImageDraw, start: Point, text: str, face: Face, size: int, spacing: float, fill: Rgb
) -> list[tuple[str, float, float]]:
    """Draw a text from the left end of the baseline; return each character with the centre."""
    font, (x, y) = face.font(size), start
    height = -font.getbbox("H", anchor="ls")[1]
    centres = []
    for char in text:
        draw.text((x, y), char, font=font, fill=fill, anchor="ls", stroke_width=face.stroke * size)
        advance = font.getlength(char)
        centres.append((char, x + advance / 2, y - height / 2))
        x += advance + spacing
    return centres


def add_noise(rng: random.Random, image: Image.Image) -> Image.Image:
    """The image with a little noise in every value."""
    pixels = np.asarray(image).astype(np.int16)
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-8, 9, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def render(
    rng: random.Random,
    size: tuple[int, int],
    split: Split = "train",
    faces: tuple[Face, ...] = FACES,
    max_circles: int = MAX_CIRCLES,
    max_others: int = 2,
    max_type: int = MAX_TYPE,
) -> Scene:
    """Draw an image of a size (width, height) with a sign of the split, in type of 14 px to `max_type`."""
    image = _background(rng, size)
    colour, shape = _pick_pair(rng, split)
    text, kind, sign = _fit_sign(rng, size, (colour, shape), split, faces, max_type)
    centre, box = _place_sign(rng, size, sign.layer.size)
    image.paste(sign.layer, (int(box[0]), int(box[1])), sign.layer)
    circles = _scatter(rng, image, box, max_circles, max_others)
    return Scene(
        image=add_noise(rng, image) if rng.random() < 0.5 else image,
        answers={"text": text, "colour": colour, "shape": shape, "circles": str(len(circles))},
        text_kind=kind,
        face=sign.face,
        type_size=sign.type_size,
        unseen_pair=(colour, shape) in HELD_OUT_PAIRS,
        characters=tuple((char, centre[0] + x, centre[1] + y) for char, x, y in sign.characters),
        circles=circles,
        sign_box=box,
    )


def _background(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    width, height = size
    image = Image.new("RGB", size, jitter(rng, rng.choice(BACKGROUNDS), 10))
    if rng.random() < 0.3:
        top = rng.randint(height // 2, height - 6)
        ImageDraw.Draw(image).rectangle((0, top, width, height), fill=jitter(rng, rng.choice(BACKGROUNDS), 10))
    return image


def _pick_pair(rng: random.Random, split: Split) -> tuple[str, str]:
    if split == "test" and rng.random() < 0.25:
        return rng.choice(sorted(HELD_OUT_PAIRS))
    while True:
        pair = rng.choice(tuple(COLOURS)), rng.choice(SHAPES)
        if pair not in HELD_OUT_PAIRS:
            return pair


def _fit_sign(
    rng: random.Random,
    size: tuple[int, int],
    pair: tuple[str, str],
    split: Split,
    faces: tuple[Face, ...],
    max_type: int,
) -> tuple[str, str, _Sign]:
    """Draw signs until a sign fits the image."""
    while True:
        text, kind = pick_text(rng, split)
        face, type_size = rng.choice(faces), rng.randint(MIN_TYPE, max_type)
        while type_size >= MIN_TYPE:
            sign = _draw_sign(rng, text, *pair, face, type_size)
            if sign.layer.width <= size[0] - 2 and sign.layer.height <= size[1] * 0.66:
                return text, kind, sign
            type_size -= 3


def _draw_sign(rng: random.Random, text: str, colour: str, shape: str, face: Face, size: int) -> _Sign:
    """Draw a sign on a separate layer and rotate the layer."""
    spacing = rng.uniform(1.0, 2.5)
    inner = text_width(face, size, text, spacing)
    tall = -face.font(size).getbbox("H", anchor="ls")[1]
    pad_x, pad_y = _padding(shape, inner, tall)
    width, height = round(inner + 2 * pad_x + rng.randint(0, 8)), round(tall + 2 * pad_y + rng.randint(0, 5))
    fill = jitter(rng, COLOURS[colour])
    layer = Image.new("RGBA", (width, height), (*fill, 0))
    draw = ImageDraw.Draw(layer)
    dark = (20, 20, 20) if colour != "black" else (235, 235, 235)
    outline = dark if colour == "white" or rng.random() < 0.5 else None
    _draw_shape(draw, shape, (width, height), fill, outline)
    shift = -2 if shape == "arrow" else 0
    start = (width - inner) / 2 + shift, (height + tall) / 2
    centres = draw_text(draw, start, text, face, size, spacing, ink(rng, colour))
    angle = rng.uniform(-MAX_ANGLE, MAX_ANGLE) if rng.random() < 0.7 else 0.0
    if angle:
        layer = layer.rotate(angle, resample=Image.Resampling.BICUBIC, expand=True)
    turned = [(char, *rotate_point((x - width / 2, y - height / 2), angle)) for char, x, y in centres]
    return _Sign(layer, tuple(turned), face.name, size)


def rotate_point(point: Point, angle: float) -> Point:
    """Return a point after rotation by an angle in degrees about the origin, in Pillow's direction."""
    (x, y), turn = point, math.radians(angle)
    return x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)


def _padding(shape: str, width: float, height: float) -> Point:
    """Return the space between a text and the edge of the shape."""
    return {
        "rectangle": (6.0, 5.0),
        "oval": (6 + 0.16 * width, 4 + 0.25 * height),
        "hexagon": (5 + 0.4 * height, 5.0),
        "arrow": (4 + 0.4 * height, 5.0),
    }[shape]


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, size: tuple[int, int], fill: Rgb, outline: Rgb | None) -> None:
    right, bottom = size[0] - 1, size[1] - 1
    middle, corner = bottom / 2, bottom * 0.42
    if shape == "rectangle":
        draw.rectangle((0, 0, right, bottom), fill=fill, outline=outline)
    elif shape == "oval":
        draw.ellipse((0, 0, right, bottom), fill=fill, outline=outline)
    else:
        points = [(right - corner, 0.0), (float(right), middle), (right - corner, float(bottom))]
        if shape == "hexagon":
            points += [(corner, float(bottom)), (0.0, middle), (corner, 0.0)]
        else:
            points += [(0.0, float(bottom)), (0.0, 0.0)]
        draw.polygon(points, fill=fill, outline=outline)


def _place_sign(
    rng: random.Random, size: tuple[int, int], sign: tuple[int, int]
) -> tuple[Point, tuple[float, float, float, float]]:
    """Place a sign in the upper or lower part of an image; return centre and box."""
    left = rng.randint(1, size[0] - sign[0] - 1)
    slack = max(0, int(size[1] * 0.66) - sign[1] - 1)
    top = 1 + rng.randint(0, slack)
    if rng.random() < 0.5:
        top = size[1] - sign[1] - top
    return (left + sign[0] / 2, top + sign[1] / 2), (left, top, left + sign[0], top + sign[1])


def _scatter(
    rng: random.Random, image: Image.Image, box: tuple[float, float, float, float], max_circles: int, max_others: int
) -> tuple[Point, ...]:
    """Draw circles, then squares and triangles, in free space; return the circles' centres."""
    draw = ImageDraw.Draw(image)
    circles, others = rng.randint(0, max_circles), rng.randint(0, max_others)
    taken: list[tuple[float, float, int]] = []
    drawn: list[Point] = []
    for index in range(circles + others):
        spot = _free_spot(rng, image.size, box, taken)
        if spot is None:
            continue
        taken.append(spot)
        x, y, radius = spot
        fill = jitter(rng, rng.choice([rgb for name, rgb in COLOURS.items() if name != "white"]))
        if index < circles:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
            drawn.append((x, y))
        elif rng.random() < 0.5:
            half = radius * 0.85
            draw.rectangle((x - half, y - half, x + half, y + half), fill=fill)
        else:
            draw.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=fill)
    return tuple(drawn)


def _free_spot(
    rng: random.Random,
    size: tuple[int, int],
    box: tuple[float, float, float, float],
    taken: list[tuple[float, float, int]],
) -> tuple[float, float, int] | None:
    largest = 5 if size[1] <= 56 else 8
    for _ in range(60):
        radius = rng.randint(4, largest)
        x, y = rng.uniform(radius + 1, size[0] - radius - 2), rng.uniform(radius + 1, size[1] - radius - 2)
        gap = radius + 2
        if box[0] - gap < x < box[2] + gap and box[1] - gap < y < box[3] + gap:
            continue
        if all((x - other_x) ** 2 + (y - other_y) ** 2 >= (gap + other + 1) ** 2 for other_x, other_y, other in taken):
            return x, y, radius
    return None
