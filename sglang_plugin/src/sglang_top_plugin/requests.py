"""Which requests the contract serves, and the seeds it gives them."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from ._contract.schema.errors import OptionRefused
from ._contract.schema.options import check_options
from ._contract.schema.temperature import check_temperature

#: Fields of a generate request that would leave the contract, and why. All others change no number.
REFUSED_FIELDS: dict[str, str] = {
    "input_embeds": "the trainer embeds token ids",
    "positional_embed_overrides": "the trainer embeds token ids",
    "image_data": "the contract's models read text alone",
    "video_data": "the contract's models read text alone",
    "audio_data": "the contract's models read text alone",
    "custom_logit_processor": "it changes the distribution that the trainer scores",
    "max_thinking_tokens": "it changes the distribution that the trainer scores",
    "return_sampling_mask": "the whole vocabulary is sampled; there is no mask",
    "multi_item_delimiter_indices": "multi-item scoring has a log-prob path of its own",
    "session_params": "sessions splice requests together; not proven",
    "lora_path": "the trainer has no adapter",
    "lora_id": "the trainer has no adapter",
    "bootstrap_host": "prefill and decode on different engines are not proven",
    "bootstrap_room": "prefill and decode on different engines are not proven",
}


def check_request(obj: Any) -> None:
    """Refuses a request (as a user sends it, one of a batch) that the contract does not serve.

    Raises:
        OptionRefused: a ValueError, which SGLang returns to the sender; the server lives on.
    """
    if not isinstance(obj, GenerateReqInput):
        raise OptionRefused(f"request {type(obj).__name__}: the contract serves generation alone")
    for field, reason in REFUSED_FIELDS.items():
        value = getattr(obj, field, None)
        # 0 is a value; what a request leaves out is None, False or an empty list
        if value is not None and value is not False and value != []:
            raise OptionRefused(f"request {field}={_short(value)}: refused, because {reason}; leave it out")
    params = obj.sampling_params
    if isinstance(params, dict) and params.get("temperature") is not None:
        # as given: once normalised, a tiny temperature is greedy at 1 and can't be told from temperature 0
        check_temperature(params["temperature"], "sampling_params temperature")


def check_sampling(params: SamplingParams) -> None:
    """Refuses normalised sampling parameters under which log-probs would not be the trainer's.

    Raises:
        OptionRefused: naming the parameter, its value and what is allowed.
    """
    values = {field: getattr(params, field) for field in params.__struct_fields__}
    if values["max_new_tokens"] == 0:  # samples nothing, scores its prompt; the bound is one of responses
        del values["max_new_tokens"]
    check_options("sglang.sampling_params", version("sglang"), values, sampling_defaults(), {})
    # Normalised, greedy is top_k 1 at temperature 1; what claims to be normalised already may hold anything.
    if check_temperature(params.temperature, "sampling_params temperature") == 0:
        raise OptionRefused(
            "sglang.sampling_params temperature=0 with is_normalized: greedy is top_k=1 at temperature 1 then; leave "
            "is_normalized out"
        )
    seed = params.sampling_seed
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise OptionRefused(f"sglang.sampling_params sampling_seed={seed!r}: allowed: a 64-bit signed integer")


def sampling_defaults() -> dict[str, Any]:
    """Parameter -> default of SGLang's sampling parameters."""
    return {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def seed_of(request_id: str, sample_index: int) -> int:
    """Seed of a request without one, in ``[0, 2**53)``, which every JSON reader keeps whole.

    SHA-256 of the id and the index: the same request id draws the same tokens again, and n samples of it differ.
    """
    digest = hashlib.sha256(f"{request_id}\0{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 11


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
