"""Process of the rollout side: the published `sglang.Engine`, started with the keywords that the launcher sends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from . import channel
from .exact import encode_fp32
from .plugin_guard import require_plugin

FLUSH_SECONDS = 60.0


class EngineHost:
    """Holds the engine between commands."""

    def __init__(self) -> None:
        self._engine: Any = None

    def start(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Start `sglang.Engine(**command["engine"])`; says what its scheduler holds in the arguments to `show`."""
        import sglang

        self._engine = sglang.Engine(**command["engine"])
        names = command.get("show")
        if not names:
            return {"options": {}}
        held = self._engine.get_server_info()["internal_states"][0]
        return {"options": {name: repr(held[name]) for name in names}}

    def receipts(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """The receipts of every rank from the engine's own server info; none from a stock engine."""
        info = self._engine.get_server_info()
        return {"receipts": info.get("true_on_policy", {}).get("receipts", [])}

    def sample(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Sample all prompts in one call: token ids, the log-probs of decode, weight versions."""
        outputs = self._engine.loop.run_until_complete(self._outputs(command))
        return {
            "responses": [list(output["output_ids"]) for output in outputs],
            "logprobs": [encode_fp32(_decode_logprobs(output)) for output in outputs],
            "weight_versions": [str(output["meta_info"]["weight_version"]) for output in outputs],
            "finish_reasons": [_finish_reason(output) for output in outputs],
            "retractions": [output["meta_info"].get("num_retractions", 0) for output in outputs],
            "cached_tokens": [output["meta_info"].get("cached_tokens", 0) for output in outputs],
        }

    async def _outputs(self, command: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """All outputs of one call, some of whose requests are aborted a while after it began."""

        async def abort() -> None:
            await asyncio.sleep(command["abort_after"])
            for request_id in command["abort"]:
                self._engine.tokenizer_manager.abort_request(rid=request_id)

        aborting = asyncio.ensure_future(abort()) if command.get("abort") else None
        prompts, sampling, ids = command["prompts"], command["sampling_params"], command.get("request_ids")
        counts = command.get("samples") or [1] * len(prompts)
        # The engine wants one number of samples in a call: those that draw several are calls of their own beside it.
        single = [index for index, count in enumerate(counts) if count == 1]
        several = [index for index, count in enumerate(counts) if count > 1]
        first, *others = await asyncio.gather(
            self._engine.async_generate(
                input_ids=[prompts[index] for index in single],
                sampling_params=[sampling[index] for index in single],
                return_logprob=True,
                rid=[ids[index] for index in single] if ids else None,
            ),
            *(
                self._engine.async_generate(
                    input_ids=prompts[index],
                    sampling_params=sampling[index] | {"n": counts[index]},
                    return_logprob=True,
                )
                for index in several
            ),
        )
        if aborting is not None:
            await aborting
        found = dict(zip(single, ([output] for output in first), strict=True)) | dict(zip(several, others, strict=True))
        return [output for index in range(len(prompts)) for output in found[index]]

    def update(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Give the engine new weights, from files of whole tensors or from a model folder, under a version.

        Several files are one update: the engine serves nothing between the first and the last. Raises RuntimeError
        with the engine's reason when it takes one of them not.
        """
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        manager, loop = self._engine.tokenizer_manager, self._engine.loop
        files, version = command["files"], command["weight_version"]
        if not files:
            request = UpdateWeightFromDiskReqInput(model_path=command["folder"], weight_version=version)
            success, message, *_ = loop.run_until_complete(manager.update_weights_from_disk(request, None))
            if not success:
                raise RuntimeError(message)
        self._session("begin_weight_update", bool(files))
        try:
            self._update_from_tensors(files, version)
        finally:
            self._session("end_weight_update", bool(files))
        return {}

    def _session(self, call: str, needed: bool) -> None:
        """Opens or closes what sglang from 0.5.21 on wants around updates from tensors; earlier ones know none."""
        if needed and hasattr(self._engine, call):
            success, message = getattr(self._engine, call)()
            if not success:
                raise RuntimeError(message)

    def _update_from_tensors(self, files: Sequence[str], version: str) -> None:
        from safetensors.torch import load_file
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        manager, loop = self._engine.tokenizer_manager, self._engine.loop
        for file in files:
            payload = self._engine._serialize_tensors_per_rank(list(load_file(file).items()), None)
            update = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payload, flush_cache=file == files[-1], weight_version=version
            )
            success, message = loop.run_until_complete(manager.update_weights_from_tensor(update, None))
            if not success:
                raise RuntimeError(message)

    def flush_cache(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Empty the prefix cache, once the engine is idle: an aborted request may still be on its way out."""
        flushed = self._engine.loop.run_until_complete(self._engine.tokenizer_manager.flush_cache(FLUSH_SECONDS))
        if not flushed.success:
            raise RuntimeError(f"the engine did not become idle within {FLUSH_SECONDS:g} s, and kept its cache")
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


def _finish_reason(output: Mapping[str, Any]) -> str:
    return str((output["meta_info"].get("finish_reason") or {}).get("type"))


def _decode_logprobs(output: Mapping[str, Any]) -> list[float]:
    entries = output["meta_info"]["output_token_logprobs"]
    tokens = [entry[1] for entry in entries]
    if tokens != list(output["output_ids"]):
        raise ValueError(
            f"request {output['meta_info']['id']}: the engine's {len(tokens)} log-probs stand at other tokens than its "
            f"{len(output['output_ids'])} output_ids"
        )
    return [float(entry[0]) for entry in entries]


def host_engine(host: EngineHost) -> None:
    """Serve the launcher until it closes the pipe, then shut the engine down."""
    channel.main(
        {
            "start": host.start,
            "receipts": host.receipts,
            "sample": host.sample,
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
