"""A trainer in one layout: model, weights, scoring, optimiser steps, receipts. What `verify` runs."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.digest import check_vendored
from ._contract.schema.errors import LayoutRefused
from ._contract.schema.layout import Layout, TrainLayout, check_layout
from ._contract.schema.profile import ModelShape, check_kernel_set, read_shape
from ._contract.schema.receipt import Receipt
from ._contract.schema.temperature import check_temperature
from ._contract.schema.versions import check_versions, installed_versions
from .batches import local_batches
from .config import Recompute, make_config
from .cpu_support import CpuSupport
from .loss import LossWeights, check_loss_weights
from .model import build_model
from .numerics import Numerics, check_available
from .packing import Sequence, check_sequences
from .ranks import Ranks
from .receipts import gather_receipts
from .recording import TrainerRecording
from .scoring import score
from .training import OptimizerSettings, StepResult, Training
from .weights.export import Take, export_weights
from .weights.load import load_hf_weights
from .weights.save import save_hf_weights


class Trainer:
    """One Megatron model in one parallel layout, over an initialised ``torch.distributed`` world.

    Every method is collective: all ranks call it with the same arguments. :meth:`close` destroys the parallel state,
    after which the same processes may open a trainer in another layout.
    """

    def __init__(
        self,
        model_dir: str | Path,
        contract: TrueOnPolicyContract,
        layout: TrainLayout,
        dtype: torch.dtype,
        *,
        recompute: Recompute | None = None,
        optimizer: OptimizerSettings | None = None,
        weight_version: str = "0",
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Builds the stage of this rank and loads its weights from the Hugging Face folder ``model_dir``.

        ``dtype`` is bfloat16 or float32. With ``optimizer`` the model is wrapped in Megatron's DDP, ready for
        :meth:`train_step`. ``weight_version`` names the weights in receipts, until an update makes them others.
        ``options`` are further ``TransformerConfig`` fields, of those that the contract leaves free.

        Raises:
            Refusal: for a model, layout or option that the contract does not cover, before anything is built.
        """
        check_vendored()
        kernel_set = contract.kernel_set_for(device)
        check_available(kernel_set, device)
        check_versions(contract, kernel_set, installed_versions("megatron", kernel_set))
        shape = read_shape(model_dir, contract)
        check_layout(Layout(train=layout), shape, contract)
        if dist.get_world_size() != layout.world_size:
            raise LayoutRefused(
                f"layout tp={layout.tp} pp={layout.pp} cp={layout.cp} dp={layout.dp} needs {layout.world_size} "
                f"processes, torch.distributed has {dist.get_world_size()}; start as many as the layout has ranks"
            )
        check_kernel_set(shape, contract, kernel_set)
        if mpu.model_parallel_is_initialized():
            raise LayoutRefused(
                "megatron's parallel state is in use: another trainer is open, or a host has set it up; close that one "
                "first, or build the model by megatron_top_plugin.hosts inside the host"
            )
        self._model_dir = Path(model_dir)
        self._layout = layout
        self._dtype = dtype
        self.weight_version = weight_version
        self._numerics = Numerics(contract, shape, kernel_set, layout.cp_layout)
        self._recompute = recompute
        self._options = dict(options or {})
        self._optimizer = optimizer
        self._cpu = CpuSupport() if device == "cpu" else None
        self._model: Any = None
        self._config: Any = None
        self._training: Training | None = None
        if self._cpu is not None:
            self._cpu.start()
        try:
            self._build()
        except BaseException:
            # Leave the process as it was, so that it can open another trainer.
            self.close()
            raise

    def _build(self) -> None:
        layout, shape = self._layout, self._numerics.shape
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            create_gloo_process_groups=False,
        )
        self._ranks = Ranks.current()
        self._config = make_config(self._numerics, layout, self._dtype, self._recompute, self._options)
        self._model = build_model(
            self._config, pre_process=self._ranks.is_first_stage, post_process=self._ranks.is_last_stage
        )
        load_hf_weights(self._model, self._model_dir, shape, self._ranks.tp, layout.tp)
        if self._optimizer is not None:
            self._training = Training(self._model, self._config, self._dtype, self._optimizer)

    @property
    def model(self) -> Any:
        """The bare model of this rank's stage."""
        return self._model

    @property
    def weight_version(self) -> str:
        """What receipts call the weights: the name last given, with ``+n`` after ``n`` updates since."""
        return f"{self._version}+{self._updates}" if self._updates else self._version

    @weight_version.setter
    def weight_version(self, name: str) -> None:
        self._version = name
        self._updates = 0

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model, from its ``config.json``."""
        return self._numerics.shape

    def score(
        self, sequences: SequenceOf[Sequence], temperature: float, micro_batch_tokens: int | None = None
    ) -> list[list[float]]:
        """Log-probs of every response token at ``temperature`` (0 is greedy, scored at 1), on every rank.

        The values are fp32, carried as Python floats, from the forward pass that gradients flow through.
        ``micro_batch_tokens`` bounds a micro-batch; it changes no bit.

        Raises:
            Refusal: for a sequence that cannot be scored, or a temperature outside 0 and 1e-6 to 1e6.
        """
        self._check(sequences, temperature)
        return score(self._model, self._config, self._layout, self._ranks, sequences, temperature, micro_batch_tokens)

    def record(
        self,
        sequences: SequenceOf[Sequence],
        temperature: float,
        folder: str | Path,
        limit: int,
        micro_batch_tokens: int | None = None,
    ) -> list[list[float]]:
        """As :meth:`score`, and writes what each rank computes at every named point into ``folder``, which exists.

        ``limit`` bounds the bytes of values that a rank keeps; digests of all rows are kept. The format is that of
        ``_contract/schema/dump.py``; its ``dump.json`` is the caller's to write.

        Raises:
            Refusal: as :meth:`score`.
        """
        self._check(sequences, temperature)
        batches = local_batches(sequences, self._layout, self._ranks, micro_batch_tokens)
        with TrainerRecording(self._model, list(sequences), batches, self._ranks, Path(folder), dist.get_rank(), limit):
            return self.score(sequences, temperature, micro_batch_tokens)

    def train_step(
        self,
        sequences: SequenceOf[Sequence],
        temperature: float,
        weights: LossWeights | None = None,
        micro_batch_tokens: int | None = None,
        *,
        update: bool = True,
    ) -> StepResult:
        """One forward-backward pass over ``sequences`` and, unless ``update`` is false, one optimiser step.

        The loss is ``sum over response tokens of -weight * logprob``, divided by the number of response tokens of all
        ranks. ``weights`` gives each token its weight (an advantage); none is 1 everywhere, the negative
        log-likelihood. Without an update, each parameter's ``main_grad`` (fp32) holds the finished gradient.

        Raises:
            Refusal: as :meth:`score`, or when the trainer was built without an optimiser, or when ``weights`` does not
                give one number for each response token.
        """
        if self._training is None:
            raise LayoutRefused("train_step: the trainer was built without optimizer=; give OptimizerSettings to train")
        self._check(sequences, temperature)
        if weights is not None:
            check_loss_weights(sequences, weights)
        result = self._training.step(
            self._layout, self._ranks, sequences, temperature, weights, micro_batch_tokens, update=update
        )
        self._updates += update
        return result

    def _check(self, sequences: SequenceOf[Sequence], temperature: float) -> None:
        """Every rank refuses what one of them would: a pipeline stage that raises alone leaves the others waiting."""
        check_temperature(temperature)
        shape = self._numerics.shape
        check_sequences(sequences, shape.vocab_size, shape.max_position_embeddings)

    def save(self, folder: str | Path) -> None:
        """Writes the current weights as a Hugging Face folder, with the config and tokenizer of the one loaded."""
        save_hf_weights(
            self._model,
            folder,
            self._numerics.shape,
            tp_group=mpu.get_tensor_model_parallel_group(),
            pp_rank=self._ranks.pp,
            pp_size=self._layout.pp,
            is_writer=self._ranks.tp == self._ranks.cp == self._ranks.dp == 0,
            source=self._model_dir,
        )

    def export(self, take: Take, bucket_bytes: int = 2**30) -> None:
        """Hands the current weights to ``take`` on global rank 0, as whole Hugging Face tensors, bucket by bucket.

        What is handed over are the parameters in the model's type, after the optimiser's step. Together the buckets
        hold every tensor once, and none is larger than ``bucket_bytes`` unless one tensor is.
        """
        export_weights(
            self._model,
            self._numerics.shape,
            tp_group=mpu.get_tensor_model_parallel_group(),
            is_writer=self._ranks.tp == self._ranks.cp == self._ranks.dp == 0,
            bucket_bytes=bucket_bytes,
            take=take,
        )

    def receipts(self) -> list[Receipt]:
        """The receipts of all ranks, read back from live objects now, on every rank."""
        hooks = self._cpu.hooks() if self._cpu is not None else ()
        return gather_receipts(
            self._model, self._numerics, self._layout, self._ranks, self._dtype, hooks, self.weight_version
        )

    def close(self) -> None:
        """Destroys Megatron's parallel state and its groups and takes the CPU support out; the world itself stays."""
        if self._training is not None:
            self._training.close()
            self._training = None
        self._model = self._config = None
        # What is left of the model holds process groups, and each group of gloo holds threads.
        gc.collect()
        groups = [group for group in mpu._global_process_group_list or () if group is not None]
        mpu.destroy_model_parallel()
        for group in groups:
            dist.destroy_process_group(group)
        if self._cpu is not None:
            self._cpu.stop()
            self._cpu = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
