"""The prompts of a run: read from JSON lines and checked, or drawn from the seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .problems import BadInput, one_line, printable

Tokenize = Callable[[dict[str, Any]], list[int]]

FIELDS = ("input_ids", "prompt", "messages")
# SGLang serves no request that fills the model's positions: it cuts the response, or refuses the prompt.
POSITIONS_OF_SGLANG = 8
LONGEST_DRAWN_PROMPT = 48


def draw_prompts(
    count: int, vocab_size: int, seed: int, prompt_tokens: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """`count` prompts of uniform token ids: of `prompt_tokens`, an eighth more or less; else of 1 to 48, the first a
    single token, the shortest there is."""
    source = random.Random(f"true-on-policy prompts {seed}")
    if prompt_tokens is None:
        lengths = [1] + [source.randint(1, LONGEST_DRAWN_PROMPT) for _ in range(count - 1)]
    else:
        spread = prompt_tokens // 8
        lengths = [source.randint(prompt_tokens - spread, prompt_tokens + spread) for _ in range(count)]
    return tuple(tuple(source.randrange(vocab_size) for _ in range(length)) for length in lengths)


def read_prompts(path: Path, model_dir: Path | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token ids of every line of a JSON-lines file, in file order.

    A line is an object with exactly one of `input_ids` (list of token ids), `prompt` (text) and `messages` (a chat);
    the two texts need the tokenizer in `model_dir`, `messages` its chat template as well.

    Raises:
        BadInput: the file can't be read or a line can't be used; the message gives `file:line`.
    """
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"--prompts {path}: is no regular file; give a file of JSON lines")
        # JSON text may hold line separators of Unicode, at which splitlines() would cut
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"--prompts {path}: can't be read as UTF-8 text: {one_line(error)}") from None
    tokenizer = _LazyTokenizer(model_dir)
    prompts = tuple(
        _read_line(line, f"{path}:{number}", tokenizer, vocab_size)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise BadInput(
            f"--prompts {path}: no prompt in it; give one JSON object a line with one of {', '.join(FIELDS)}"
        )
    return prompts


def check_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_position_embeddings: int) -> None:
    """Refuse a prompt whose answer would leave the model's positions."""
    for index, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > max_position_embeddings - POSITIONS_OF_SGLANG:
            raise BadInput(
                f"prompt {index} has {len(prompt)} tokens; with --max-new-tokens {max_new_tokens} that exceeds the "
                f"model's max_position_embeddings {max_position_embeddings} less {POSITIONS_OF_SGLANG}, which SGLang "
                "keeps free; shorten one of them"
            )


def _read_line(line: str, where: str, tokenizer: _LazyTokenizer, vocab_size: int) -> tuple[int, ...]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not usable as JSON: {one_line(error)}") from None
    if not isinstance(record, dict):
        raise BadInput(f"{where}: a {type(record).__name__} where an object with one of {', '.join(FIELDS)} is needed")
    given = [field for field in FIELDS if field in record]
    if len(given) != 1:
        raise BadInput(f"{where}: has {' and '.join(given) or 'none'} of {', '.join(FIELDS)}; exactly one is needed")
    if given == ["input_ids"]:
        return _check_ids(record["input_ids"], where, vocab_size)
    return _check_ids(tokenizer.encode(given[0], record[given[0]], where), where, vocab_size)


def _check_ids(ids: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise BadInput(f"{where}: input_ids is a {type(ids).__name__}, not a list of token ids")
    if not ids:
        raise BadInput(f"{where}: empty prompt; at least one token is needed")
    for position, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool):
            raise BadInput(f"{where}: input_ids[{position}] is {token!r}, not an integer")
        if not 0 <= token < vocab_size:
            raise BadInput(f"{where}: input_ids[{position}] is {token}, outside the vocabulary 0..{vocab_size - 1}")
    return tuple(ids)


def _tokens(tokenizer: Any, text: str, where: str, **options: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = printable(text[error.start])
        raise BadInput(
            f"{where}: character {error.start} is {half}, half of a surrogate pair; no text has it"
        ) from None
    return [int(token) for token in tokenizer.encode(text, **options)]


class _LazyTokenizer:
    """The model folder's own tokenizer, loaded only when a line needs it."""

    def __init__(self, model_dir: Path | None):
        self._model_dir = model_dir
        self._tokenizer: Any = None

    def encode(self, field: str, value: Any, where: str) -> list[int]:
        tokenizer = self._load(field, where)
        if field == "prompt":
            if not isinstance(value, str):
                raise BadInput(f"{where}: prompt is a {type(value).__name__}, not a text")
            return _tokens(tokenizer, value, where)
        if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value) or not value:
            raise BadInput(f"{where}: messages is not a list of at least one object with role and content")
        if not tokenizer.chat_template:
            raise BadInput(
                f"{where}: messages needs a chat template and the tokenizer in {self._model_dir} has none; "
                "use prompt or input_ids"
            )
        try:
            text = tokenizer.apply_chat_template(value, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # noqa: BLE001 (a template is its author's program and may raise anything)
            raise BadInput(f"{where}: the chat template refuses these messages: {one_line(error)}") from None
        return _tokens(tokenizer, text, where, add_special_tokens=False)

    def _load(self, field: str, where: str) -> Any:
        if self._tokenizer is None:
            if self._model_dir is None or not any(
                (self._model_dir / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
            ):
                place = "the tiny model" if self._model_dir is None else str(self._model_dir)
                raise BadInput(f"{where}: {field} needs a tokenizer and {place} has none; use input_ids")
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(str(self._model_dir), local_files_only=True)
            except (OSError, ValueError, ImportError) as error:
                raise BadInput(
                    f"{where}: the tokenizer in {self._model_dir} can't be loaded: {one_line(error)}"
                ) from None
        return self._tokenizer
