"""Process: one SGLang engine, stock or under the contract, scores given responses by prefill.

``python -m tests.gpu.prefill_scores IN.json OUT.json``; the input holds ``engine`` (keywords of ``sglang.Engine``),
``prompts``, ``responses`` and ``temperature``, the output ``logprobs`` as hexadecimal fp32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from miles_top_launcher.workers.exact import encode_fp32
from tests.sglang.rollout import Sample, rescore


def main() -> None:
    import sglang

    given, out = map(Path, sys.argv[1:])
    command = json.loads(given.read_text(encoding="utf-8"))
    samples = [
        Sample(tuple(prompt), tuple(response), (), {})
        for prompt, response in zip(command["prompts"], command["responses"], strict=True)
    ]
    engine = sglang.Engine(**command["engine"])
    rows = rescore(engine, samples, command["temperature"])
    out.write_text(json.dumps({"logprobs": [encode_fp32(row) for row in rows]}), encoding="utf-8")
    engine.shutdown()


if __name__ == "__main__":
    main()
