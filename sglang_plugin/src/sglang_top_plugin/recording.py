"""Records what a scheduler process computes at every named point, through torch's module hooks.

Asked for over the engine's own RPC (``Engine.collective_rpc``), which calls a method of the scheduler by name on every
rank; the two methods are put on the class when a contract is activated. Without a recording no module carries a hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ._contract.recording.recorder import Recorder
from ._contract.schema.errors import Refusal
from ._contract.schema.points import held_segments, layer_point
from .active import active

START = "start_recording"
STOP = "stop_recording"
_RECORDING = "true_on_policy_recording"


def add_methods(scheduler_class: type) -> None:
    """Makes a recording reachable over the engine's RPC."""
    setattr(scheduler_class, START, _start)
    setattr(scheduler_class, STOP, _stop)


def _start(self: Any, folder: str, requests: Mapping[str, int], limit: int) -> None:
    """Records the requests whose id is a key of ``requests`` under its number, until :func:`_stop`."""
    if getattr(self, _RECORDING, None) is not None:
        raise Refusal("recording: one is running already; stop it first")
    setattr(self, _RECORDING, RolloutRecording(self.tp_worker.model_runner.model, Path(folder), requests, limit))


def _stop(self: Any) -> None:
    """Takes the hooks out and writes this rank's part of the dump."""
    recording = getattr(self, _RECORDING, None)
    if recording is None:
        raise Refusal("recording: none is running; start one first")
    setattr(self, _RECORDING, None)
    recording.finish()


class RolloutRecording:
    """Hooks on the modules of one rank's model."""

    def __init__(self, model: Any, folder: Path, requests: Mapping[str, int], limit: int) -> None:
        run = active()
        self._recorder = Recorder(folder, run.tp_rank, limit)
        self._requests = requests
        self._rows = np.empty((0, 2), np.int32)
        self._last_rows = self._rows
        self._handles: list[Any] = []
        self._attentions = [layer.self_attn for layer in model.model.layers]
        self._attach(model)

    def finish(self) -> None:
        """Removes every hook, then writes."""
        for handle in self._handles:
            handle.remove()
        for attention in self._attentions:
            attention.steps_apart = False
        self._recorder.finish()

    def _attach(self, model: Any) -> None:
        self._before(model.model, self._begin)
        self._after(model.model.embed_tokens, lambda args, out: self._add("embedding", out))
        for index, layer in enumerate(model.model.layers):
            self._attach_layer(index, layer)
        last = len(model.model.layers) - 1
        self._after(
            model.model.norm, lambda args, out: self._normed(args, out, layer_point(last, "mlp_sum"), "final_norm")
        )
        self._after(model.logits_processor, lambda args, out: self._logits(out))

    def _attach_layer(self, index: int, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        attention.steps_apart = True

        def name(op: str) -> str:
            return layer_point(index, op)

        before = layer_point(index - 1, "mlp_sum") if index else None
        self._after(layer.input_layernorm, lambda args, out: self._normed(args, out, before, name("input_norm")))
        self._after(attention.qkv_proj, lambda args, out: self._add(name("qkv"), out[0]))
        if attention.has_qk_norm:
            self._after(attention.q_norm, lambda args, out: self._add(name("q_norm"), out))
            self._after(attention.k_norm, lambda args, out: self._add(name("k_norm"), out))

        def rotated(args: Any, kwargs: Any) -> None:
            self._add(name("q_rope"), args[0])
            self._add(name("k_rope"), args[1])

        self._before(attention.attn, rotated)
        self._after(attention.attn, lambda args, out: self._add(name("attention"), out))
        self._after(attention.o_proj, lambda args, out: self._add(name("o_proj"), out[0]))
        self._after(
            layer.post_attention_layernorm,
            lambda args, out: self._normed(args, out, name("attention_sum"), name("post_attention_norm")),
        )
        self._after(mlp.gate_up_proj, lambda args, out: self._add(name("gate_up"), out[0]))
        self._before(mlp.down_proj, lambda args, kwargs: self._add(name("swiglu"), args[0]))
        self._after(mlp.down_proj, lambda args, out: self._add(name("down_proj"), out[0]))

    def _before(self, module: Any, hook: Any) -> None:
        def call(_module: Any, args: Any, kwargs: Any) -> None:
            hook(args, kwargs)

        self._handles.append(module.register_forward_pre_hook(call, with_kwargs=True))

    def _after(self, module: Any, hook: Any) -> None:
        def call(_module: Any, args: Any, out: Any) -> None:
            hook(args, out)

        self._handles.append(module.register_forward_hook(call))

    def _begin(self, args: Any, kwargs: Any) -> None:
        """Names the rows of this forward pass: whose token each is, and where in its sequence."""
        positions, batch = args[1], args[2]
        decode = batch.forward_mode.is_decode()
        lengths = [1] * batch.batch_size if decode else list(batch.extend_seq_lens_cpu)
        numbers = [self._requests.get(rid, -1) for rid in batch.rids]
        self._rows = np.empty((positions.shape[0], 2), np.int32)
        self._rows[:, 0] = np.repeat(numbers, lengths)
        self._rows[:, 1] = positions.cpu().numpy()
        self._last_rows = self._rows[np.cumsum(lengths) - 1]

    def _add(self, point: str, value: Tensor, rows: np.ndarray[Any, Any] | None = None) -> None:
        run = active()
        op = point.rpartition(".")[2]
        # Logits are gathered over ranks before anyone sees them.
        ranks = (0, 1) if op == "logits" else (run.tp_rank, run.tp_size)
        rows = self._rows if rows is None else rows
        self._recorder.add(point, rows, value.reshape(rows.shape[0], -1), held_segments(op, run.shape, *ranks))

    def _normed(self, args: Any, out: Any, sum_point: str | None, norm_point: str) -> None:
        """A norm behind a residual: the kernel never writes the unrounded sum down, so it is added up again here."""
        if sum_point is None:
            self._add(norm_point, out)
            return
        self._add(sum_point, args[0].float() + args[1].float())
        self._add(norm_point, out[0])

    def _logits(self, out: Any) -> None:
        if out.next_token_logits is not None:
            self._add("logits", out.next_token_logits, self._last_rows)
