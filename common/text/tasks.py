"""Florence-2's tasks (Xiao et al., 2023), each a token that stands for a question about the image."""

from __future__ import annotations

from typing import Final

from common.errors import invalid

TASKS: Final = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {input}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {input} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {input}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {input} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {input}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {input} describe?",
    "<REGION_TO_OCR>": "What text is in the region {input}?",
}
"""In the words of the training. `{input}` is the text beside the task."""


def question_of(text: str, param: str) -> str:
    """Return a text with its task as a question, as transformers' processor does; a text without one stays.

    Raises TriptychError("invalid_request") naming `param` for text beside a task that takes none.
    """
    for task, question in TASKS.items():
        if task in text:
            if "{input}" not in question and text != task:
                raise invalid(f"the task {task} takes no other text, not {text!r:.80}", param)
            return question.replace("{input}", text.replace(task, "").strip())
    return text
