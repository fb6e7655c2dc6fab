"""Process of the train side: one rank of the Megatron trainer, rebuilt for each layout that the launcher sends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import channel
from .exact import encode_fp32
from .process_group import BACKENDS

DTYPES = ("bfloat16", "float32")


class TrainerHost:
    """Holds the trainer between commands."""

    def __init__(self) -> None:
        self._trainer: Any = None

    def start(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Import the engine, which is most of a start."""
        import megatron_top_plugin.trainer  # noqa: F401

        return {}

    def build(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Bring the process group of this layout up and build the model in it."""
        import torch

        from megatron_top_plugin._contract.schema.contract import TrueOnPolicyContract
        from megatron_top_plugin._contract.schema.layout import TrainLayout
        from megatron_top_plugin.trainer import Trainer
        from megatron_top_plugin.training import OptimizerSettings

        if command["dtype"] not in DTYPES:
            raise ValueError(f"dtype {command['dtype']!r} is not one of {', '.join(DTYPES)}")
        if command["device"] == "cuda":
            torch.cuda.set_device(command["rank"] % torch.cuda.device_count())
        torch.distributed.init_process_group(
            BACKENDS[command["device"]],
            init_method=f"file://{command['rendezvous']}",
            rank=command["rank"],
            world_size=command["world_size"],
        )
        self._trainer = Trainer(
            command["model_dir"],
            TrueOnPolicyContract.from_json(command["contract"]),
            TrainLayout(**command["layout"]),
            getattr(torch, command["dtype"]),
            device=command["device"],
            weight_version=command["weight_version"],
            optimizer=OptimizerSettings(**command["optimizer"]) if command.get("optimizer") is not None else None,
            options=command["options"],
        )
        config = self._trainer.model.config
        return {"options": {name: repr(getattr(config, name)) for name in command["options"]}, **self._receipts()}

    def _receipts(self) -> dict[str, Any]:
        return {"receipts": [receipt.model_dump(mode="json") for receipt in self._trainer.receipts()]}

    def score(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Log-probs of the responses, gathered from all ranks; with `recording`, every named point goes to a folder."""
        sequences = _sequences(command)
        how = {"temperature": command["temperature"], "micro_batch_tokens": command["micro_batch_tokens"]}
        recording = command.get("recording")
        rows = (
            self._trainer.score(sequences, **how)
            if recording is None
            else self._trainer.record(sequences, folder=recording["folder"], limit=recording["limit"], **how)
        )
        return {"logprobs": [encode_fp32(row) for row in rows]}

    def step(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """One optimiser step; the receipts show the new weights under their new version."""
        result = self._trainer.train_step(
            _sequences(command),
            temperature=command["temperature"],
            weights=command["weights"],
            micro_batch_tokens=command["micro_batch_tokens"],
        )
        self._trainer.weight_version = command["weight_version"]
        return {"loss": result.loss, "grad_norm": result.grad_norm, **self._receipts()}

    def export(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Write the weights into a folder that does not exist yet: a Hugging Face model, or files of whole tensors."""
        folder = Path(command["folder"])
        if command["way"] == "disk":
            self._trainer.save(folder)
            return {"files": []}
        from safetensors.torch import save_file

        files: list[str] = []

        def take(bucket: list[tuple[str, Any]]) -> None:
            folder.mkdir(exist_ok=True)
            files.append(str(folder / f"bucket-{len(files):05d}.safetensors"))
            save_file(dict(bucket), files[-1])

        self._trainer.export(take, command["bucket_bytes"])
        return {"files": files}

    def close(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Tear the model and the process group down, keep the process."""
        import torch

        self._trainer.close()
        self._trainer = None
        torch.distributed.destroy_process_group()
        if torch.cuda.is_available():
            # An engine may share the GPU.
            torch.cuda.empty_cache()
        return {}


def _sequences(command: Mapping[str, Any]) -> list[Any]:
    from megatron_top_plugin.packing import Sequence

    return [
        Sequence(prompt=prompt, response=response)
        for prompt, response in zip(command["prompts"], command["responses"], strict=True)
    ]


def main() -> None:
    host = TrainerHost()
    channel.main(
        {
            "start": host.start,
            "build": host.build,
            "score": host.score,
            "step": host.step,
            "export": host.export,
            "close": host.close,
        },
    )


if __name__ == "__main__":
    main()
