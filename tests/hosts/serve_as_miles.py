"""A process that starts SGLang as Miles' engine actor does: ``... tests.hosts.serve_as_miles MODEL HOW PROMPTS OUT``.

``HOW`` is ``loaded`` (as Ray's setup hook leaves a worker), ``unloaded`` (as stock Miles is), or ``by-hand`` (the name
put on a finished ``ServerArgs``). ``PROMPTS`` are token ids as JSON; what was drawn and shown goes into ``OUT``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import requests

#: As Miles samples; its top-k of -1 means the whole vocabulary.
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 8,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(model: str, how: str, prompts: str, out: str) -> None:
    if how == "loaded":
        from sglang_top_plugin.hosts import load

        load()
    from miles.backends.sglang_utils.sglang_engine import _compute_server_args, _wait_server_healthy
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    from tests.hosts.miles_arguments import parse, rendered

    contract = os.environ.get("TRUE_ON_POLICY_CONTRACT")
    if how == "by-hand":
        del os.environ["TRUE_ON_POLICY_CONTRACT"]
    options = {"sglang_device": "cpu", "sglang_max_total_tokens": 4096, "sglang_log_level": "warning"}
    args = parse(rendered(model, sglang_skip_tokenizer_init=True, **options))
    fields, _ = _compute_server_args(args, 0, f"127.0.0.1:{_port()}", _port(), "127.0.0.1", _port())
    made = ServerArgs(**fields)
    if how == "by-hand":
        # Past the class's own refusal to be changed, which SGLang has since 0.5.17.
        made.__dict__["true_on_policy_contract"] = contract
    # Miles' launch_server_process, but for its first line: it assigns to a ServerArgs, which is read-only here.
    process = multiprocessing.get_context("spawn").Process(target=launch_server, args=(made,))
    process.start()
    url = f"http://127.0.0.1:{made.port}"
    _wait_server_healthy(url, None, process.is_alive)
    answers = requests.post(
        f"{url}/generate",
        json={"input_ids": json.loads(prompts), "sampling_params": SAMPLING, "return_logprob": True},
        timeout=120,
    ).json()
    info = requests.get(f"{url}/get_server_info", timeout=60).json()
    drawn = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
    Path(out).write_text(json.dumps({"drawn": drawn, "receipts": info["true_on_policy"]["receipts"]}))
    process.kill()
    process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
