"""What the trainer tests score: drawn samples, and the model that serves where a test asks for no special one."""

from __future__ import annotations

import torch

from miles_top_launcher.random_model import RandomModel

#: Untied, with weights at initial scale.
FRESH = RandomModel(tied=False, trained=False)


def prompts(vocab_size: int, lengths: list[tuple[int, int]], seed: int = 11) -> list[tuple[list[int], list[int]]]:
    """Random (prompt, response) token lists of the given lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return [int(token) for token in torch.randint(0, vocab_size, (count,), generator=generator)]

    return [(draw(before), draw(after)) for before, after in lengths]


def advantages(samples: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    """A weight a response token, of signs and sizes as advantages have them."""
    return [[(-1.0) ** i * (0.5 + 0.25 * (i % 3)) for i in range(len(response))] for _, response in samples]
