"""Which requests the contract serves, and the seeds it gives them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from ._contract.schema.errors import OptionRefused
from ._contract.schema.options import check_options, dataclass_defaults
from ._contract.schema.temperature import check_temperature


def check_request(obj: Any) -> None:
    """Refuses a request (as a user sends it, one of a batch) that the contract does not serve.

    Raises:
        OptionRefused: a ValueError, which SGLang returns to the sender; the server lives on.
    """
    if not isinstance(obj, GenerateReqInput):
        raise OptionRefused(f"request {type(obj).__name__}: the contract serves generation alone")
    values = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    check_options("sglang.generate_request", version("sglang"), values, dataclass_defaults(type(obj)), {})
    params = obj.sampling_params
    if isinstance(params, dict):
        check_given_sampling(params)


def check_given_sampling(params: Mapping[str, Any]) -> None:
    """Refuses what can't be told any more once the engine has normalised a request's parameters.

    Raises:
        OptionRefused: naming the parameter, its value and what is allowed.
    """
    if params.get("temperature") is not None:
        # a tiny temperature is greedy at 1 then, as temperature 0 is
        check_temperature(params["temperature"], "sampling_params temperature")
    if params.get("is_normalized"):
        raise OptionRefused(
            f"sglang.sampling_params is_normalized={params['is_normalized']!r}: the engine would read the parameters "
            "as they stand, where -1 is no top_k and stop strings have no length; leave it out"
        )


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
