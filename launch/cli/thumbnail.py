"""Pictures in the terminal: two pixels to a character cell."""

from __future__ import annotations

from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text


def thumbnail(image: Image.Image, columns: int) -> Text:
    """Return the image over `columns` cells, each an upper half block: foreground for the upper pixel, background for
    the lower."""
    rows = max(1, round(columns * image.height / image.width / 2))
    small = image.convert("RGB").resize((columns, 2 * rows), Image.Resampling.LANCZOS)
    pixels = small.tobytes()

    def colour(x: int, y: int) -> Color:
        at = 3 * (y * columns + x)
        return Color.from_rgb(*pixels[at : at + 3])

    text = Text(no_wrap=True)
    for row in range(rows):
        for x in range(columns):
            text.append("▀", Style(color=colour(x, 2 * row), bgcolor=colour(x, 2 * row + 1)))
        text.append("\n")
    text.rstrip()
    return text
