"""Random request mixes, the same for the same seed and round."""

from __future__ import annotations

import random

from ..samples import Batch

LONGEST_PROMPT = 600
TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
# Long enough that its requests are in flight when the others have gone, and an abort hits them.
LONGEST_RESPONSE = 300


def draw_batch(seed: int, number: int, vocab_size: int, requests: int) -> Batch:
    """The requests of round `number`: prompts of 1 to 600 tokens, a third of them continuing one shared prefix (so
    that the cache is hit) and some drawn twice with other seeds; short and long responses; one temperature; two that
    are aborted while they run, and one that draws three samples."""
    rng = random.Random(f"{seed}:{number}")

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size - 1) for _ in range(count))

    shared = tokens(rng.randint(20, 200))
    prompts: list[tuple[int, ...]] = []
    for index in range(requests):
        if index % 3 == 1:
            prompts.append(shared + tokens(rng.randint(1, 60)))
        elif index % 5 == 4:
            prompts.append(rng.choice(prompts))
        else:
            prompts.append(tokens(rng.choice((1, 2, rng.randint(3, 60), rng.randint(61, LONGEST_PROMPT)))))
    aborted = tuple(sorted(rng.sample(range(requests), 2)))
    lengths = [rng.choice((1, 2, rng.randint(3, 60), rng.randint(3, 60))) for _ in range(requests)]
    for index in aborted:
        lengths[index] = LONGEST_RESPONSE
    several = rng.choice([index for index in range(requests) if index not in aborted])
    return Batch(
        prompts=tuple(prompts),
        max_new_tokens=tuple(lengths),
        seeds=tuple(rng.randrange(2**31) for _ in range(requests)),
        temperature=rng.choice(TEMPERATURES),
        request_ids=tuple(f"round-{number:05d}-request-{index:05d}" for index in range(requests)),
        samples=tuple(3 if index == several else 1 for index in range(requests)),
        aborted=aborted,
        abort_after=rng.uniform(0.05, 0.6),
    )
