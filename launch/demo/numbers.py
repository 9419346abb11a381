"""The demo's second part: numbers into words and back, and dates, by numerals, an encoder-decoder of text."""

from __future__ import annotations

import asyncio
from datetime import date
from random import Random

from rich.console import Console
from rich.text import Text

from launch.cli.client import ApiClient, ClientOptions, ClientRequest

_LANGUAGES = ("en", "de", "fr") * 2
_DATES = 2


async def follow_chains(base_url: str, rng: Random, api_key: str | None) -> list[list[str]]:
    """Ask for numbers in words, then for these words in digits; and for dates in ISO form, all at once.

    Return the texts of each chain, question and answers, and then the right last answer."""
    options = ClientOptions(base_url, None, max_tokens=48, temperature=0.0, timeout_s=90.0, api_key=api_key)
    numbers = [(language, rng.randrange(10 ** rng.randrange(3, 7))) for language in _LANGUAGES]
    days = [date.fromordinal(rng.randrange(700_000, 750_000)) for _ in range(_DATES)]
    async with ApiClient(options) as client:
        await client.connect()

        async def follow(text: str, expected: str, steps: int) -> list[str]:
            chain = [text]
            for _ in range(steps):
                outcome = await client.send(ClientRequest(chain[-1], chain[-1]))
                chain.append(outcome.error or outcome.text)
            return [*chain, expected]

        there_and_back = [follow(f"{language}: {number}", f"{number}", 2) for language, number in numbers]
        return await asyncio.gather(*there_and_back, *(follow(f"{d.day} {d:%B %Y}", f"{d}", 1) for d in days))


def show_chains(console: Console, chains: list[list[str]]) -> int:
    """Print all chains; return 1 if more than one ends in a wrong answer, 0 otherwise."""
    for *texts, expected in chains:
        mark = ("✓ ", "bold green") if texts[-1] == expected else ("✗ ", "bold red")
        console.print(Text.assemble(mark, " → ".join(texts)))
    num_right = sum(chain[-2] == chain[-1] for chain in chains)
    console.print(f"{num_right} of {len(chains)} numbers and dates right", style="bold")
    return int(len(chains) - num_right > 1)
