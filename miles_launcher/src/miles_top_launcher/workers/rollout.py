"""Process of the rollout side: the published `sglang.Engine`, started with the keywords that the launcher sends."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from .channel import die_with_launcher, serve
from .exact import encode_fp32
from .plugin_guard import require_plugin


class EngineHost:
    """Holds the engine between commands."""

    def __init__(self) -> None:
        self._engine: Any = None

    def start(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Start `sglang.Engine(**command["engine"])`."""
        import sglang

        self._engine = sglang.Engine(**command["engine"])
        return {}

    def receipts(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """The receipts of every rank from the engine's own server info; none from a stock engine."""
        info = self._engine.get_server_info()
        return {"receipts": info.get("true_on_policy", {}).get("receipts", [])}

    def sample(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Sample all prompts in one call: token ids, the log-probs of decode, weight versions."""
        outputs = self._engine.generate(
            input_ids=command["prompts"],
            sampling_params=command["sampling_params"],
            return_logprob=True,
            rid=command.get("request_ids"),
        )
        return {
            "responses": [list(output["output_ids"]) for output in outputs],
            "logprobs": [encode_fp32(_decode_logprobs(output)) for output in outputs],
            "weight_versions": [str(output["meta_info"]["weight_version"]) for output in outputs],
        }

    def serve(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Serve requests at the same time, each with its own parameters; for each, the list of its samples."""

        async def everyone() -> list[list[dict[str, Any]]]:
            return await asyncio.gather(*(self._serve_one(request) for request in command["requests"]))

        return {"responses": self._engine.loop.run_until_complete(everyone())}

    async def _serve_one(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        call = {
            "input_ids": request["prompt"],
            "sampling_params": {
                "max_new_tokens": request["max_new_tokens"],
                "temperature": request["temperature"],
                "sampling_seed": request["seed"],
                "n": request["samples"],
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        if request["abort_after"] is None:
            outputs = await self._engine.async_generate(**call)
            return [_response(output) for output in (outputs if isinstance(outputs, list) else [outputs])]
        rid, asked = request["id"], False
        last: Mapping[str, Any] = {}
        async for output in await self._engine.async_generate(**call, rid=rid, stream=True):
            last = output
            if not asked and output["meta_info"]["completion_tokens"] >= request["abort_after"]:
                self._engine.tokenizer_manager.abort_request(rid=rid)
                asked = True
        return [_response(last)]

    def update(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Update the weights from bucket files or from a model folder; the engine's own words about it."""
        manager = self._engine.tokenizer_manager
        for request in self._update_requests(command):
            way = manager.update_weights_from_disk if command["way"] == "disk" else manager.update_weights_from_tensor
            success, message, *_ = self._engine.loop.run_until_complete(way(request, None))
            if not success:
                break
        return {"success": success, "message": message}

    def _update_requests(self, command: Mapping[str, Any]) -> Iterator[Any]:
        """The engine's update requests one after the other, so that one bucket is in memory at a time."""
        from safetensors.torch import load_file
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        version = command["weight_version"]
        if command["way"] == "disk":
            yield UpdateWeightFromDiskReqInput(model_path=command["folder"], weight_version=version)
            return
        for number, file in enumerate(command["files"], start=1):
            bucket = FlattenedTensorBucket(named_tensors=list(load_file(file).items()))
            payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            yield UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[
                    MultiprocessingSerializer.serialize(payload) for _ in range(self._engine.server_args.tp_size)
                ],
                load_format="flattened_bucket",
                flush_cache=number == len(command["files"]),
                weight_version=version,
            )

    def flush_cache(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Empty the prefix cache; an engine that is not idle does not."""
        if not self._engine.flush_cache().success:
            raise RuntimeError("the engine did not flush its cache; it is not idle")
        return {}

    def start_recording(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Have every rank write what it computes into a folder, from an empty cache: a cached row is not computed."""
        self.flush_cache(command)
        self._engine.collective_rpc(
            "start_recording", folder=command["folder"], requests=command["requests"], limit=command["limit"]
        )
        return {}

    def stop_recording(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """End the recording; the files are written when this returns."""
        self._engine.collective_rpc("stop_recording")
        return {}

    def stop(self) -> None:
        """Shut the engine down with its children."""
        if self._engine is not None:
            self._engine.shutdown()


def _response(output: Mapping[str, Any]) -> dict[str, Any]:
    meta = output["meta_info"]
    finish = meta["finish_reason"] or {}
    return {
        "tokens": list(output["output_ids"]),
        "logprobs": encode_fp32(_decode_logprobs(output)),
        "weight_version": meta["weight_version"],
        "cached_tokens": meta["cached_tokens"],
        "retractions": meta["num_retractions"],
        "aborted": finish.get("type") == "abort",
        "finish_reason": str(finish),
    }


def _decode_logprobs(output: Mapping[str, Any]) -> list[float]:
    entries = output["meta_info"]["output_token_logprobs"]
    tokens = [entry[1] for entry in entries]
    if tokens != list(output["output_ids"]):
        raise ValueError("the engine's log-probs stand at other tokens than its output_ids")
    return [float(entry[0]) for entry in entries]


def host_engine(host: EngineHost) -> None:
    """Serve the launcher until it closes the pipe, then shut the engine down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply-fd", type=int, required=True)
    arguments = parser.parse_args()
    die_with_launcher()
    serve(
        arguments.reply_fd,
        {
            "start": host.start,
            "receipts": host.receipts,
            "sample": host.sample,
            "serve": host.serve,
            "update": host.update,
            "flush_cache": host.flush_cache,
            "start_recording": host.start_recording,
            "stop_recording": host.stop_recording,
        },
    )
    host.stop()


if __name__ == "__main__":
    host_engine(EngineHost())
elif __name__ == "__mp_main__":
    # The engine's processes are spawned and import this module again under this name, before anything of SGLang.
    require_plugin()
