"""Puts the contract's log-prob where Miles and slime compute theirs, and holds each batch against its rollout.

Both hosts cut the response's logits out of a packed batch (``get_log_probs_and_entropy``) and hand the rows to
``calculate_log_probs_and_entropy``. The cutting stays theirs, so that it fits their batches whatever the layout; the
second function is ours, and divides by the temperature itself, which the host is therefore told to leave alone. What
the host does with the result is watched where its policy loss is: a token whose bits differ ends the run, where the
host's own metric maps NaN to 0 and does not say how many tokens it covers.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ._contract.schema.errors import OptionRefused, ReceiptMismatch, VersionRefused
from ._contract.schema.receipt import HookReceipt
from ._contract.schema.temperature import check_temperature
from ._contract.schema.versions import is_allowed
from .host_options import check_host_options
from .logprobs import scoring_temperature, vocabulary_shard
from .numerics import Numerics
from .ops.entropy import token_entropy
from .ops.logprob import token_logprob


@dataclass(frozen=True, slots=True)
class Host:
    """A training framework: its package, the module of its losses, its distribution and the versions that were read.

    slime is published on no package index; a checkout of it is held against the functions' parameters alone.
    """

    package: str
    losses: str
    distribution: str
    versions: tuple[str, ...]


HOSTS = (
    Host("miles", "miles.backends.training_utils.loss", "miles-rl", ("0.0.2",)),
    Host("slime", "slime.backends.megatron_utils.loss", "slime", ()),
)

#: (function, why, parameters that it must have).
REPLACED = (
    (
        "calculate_log_probs_and_entropy",
        "the host's log-prob is a fused cross entropy over the padded vocabulary",
        ("logits", "tokens", "tp_group", "with_entropy"),
    ),
    (
        "get_log_probs_and_entropy",
        "the host divides by the temperature before its log-prob is called, as a product on a GPU",
        ("logits", "args", "with_entropy"),
    ),
    (
        "policy_loss_function",
        "the host's metric maps NaN to 0 and counts no tokens",
        ("args", "batch", "logits"),
    ),
)


@dataclass(slots=True)
class _Call:
    """One call of the host's ``get_log_probs_and_entropy``: what it was given, and the rows that reached ours."""

    logits: Tensor
    temperature: float
    rows: int = 0


@dataclass(slots=True)
class HostLogprob:
    """The replacements in one process."""

    host: Host
    numerics: Numerics
    compared_tokens: int = 0
    receipts_shown: int = 0
    _originals: dict[str, Any] = field(default_factory=dict)
    _ours: dict[str, Any] = field(default_factory=dict)
    _call: _Call | None = None
    _logprobs: list[Tensor] = field(default_factory=list)

    def start(self) -> None:
        """Replaces the functions in every module of the host that holds them.

        Raises:
            VersionRefused: for a version that nobody has read, or a function of other parameters.
        """
        losses = importlib.import_module(self.host.losses)
        _check_version(self.host)
        for name, _, parameters in REPLACED:
            function = getattr(losses, name, None)
            found = inspect.signature(function).parameters if callable(function) else {}
            if missing := [parameter for parameter in parameters if parameter not in found]:
                raise VersionRefused(
                    f"{self.host.losses}.{name}: lacks {', '.join(missing)}; install {self.host.distribution} "
                    f"{' or '.join(self.host.versions) or 'of a version whose function has it'}"
                )
            self._originals[name] = function
        makers = (self._calculate, self._get, self._policy_loss)
        for (name, _, _), make in zip(REPLACED, makers, strict=True):
            self._ours[name] = make(self._originals[name])
        for name, original in self._originals.items():
            for module in self._holders(name, original):
                setattr(module, name, self._ours[name])

    def stop(self) -> None:
        """Puts the host's functions back."""
        for name, ours in self._ours.items():
            for module in self._holders(name, ours):
                setattr(module, name, self._originals[name])
        self._ours.clear()

    def hooks(self) -> tuple[HookReceipt, ...]:
        """Each replacement, and whether the host's modules hold it now and the host's own nowhere."""
        losses = sys.modules[self.host.losses]
        return tuple(
            HookReceipt(
                target=f"{self.host.losses}.{name}",
                reason=why,
                in_place=name in self._ours
                and getattr(losses, name) is self._ours[name]
                and not self._holders(name, self._originals[name]),
            )
            for name, why, _ in REPLACED
        )

    def _holders(self, name: str, function: Any) -> list[Any]:
        prefix = self.host.package + "."
        modules = [module for key, module in tuple(sys.modules.items()) if key.startswith(prefix)]
        return [module for module in modules if vars(module).get(name) is function]

    def _get(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_log_probs_and_entropy(logits: Tensor, *, args: Any, **kwargs: Any) -> Any:
            check_host_options(args)
            untouched = copy.copy(args)
            untouched.rollout_temperature = 1.0
            self._call = _Call(logits, float(args.rollout_temperature))
            try:
                result = original(logits, args=untouched, **kwargs)
                found = result[1] if isinstance(result, tuple) else result
                self._logprobs = [values.detach() for values in found["log_probs"]]
                if sum(values.numel() for values in self._logprobs) > self._call.rows:
                    raise ReceiptMismatch(
                        f"{self.host.losses}.get_log_probs_and_entropy returned log-probs that the contract did not "
                        f"compute; install a version of {self.host.distribution} that was checked"
                    )
            finally:
                self._call = None
            return result

        return get_log_probs_and_entropy

    def _calculate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def calculate_log_probs_and_entropy(
            logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, **others: Any
        ) -> tuple[Tensor, Tensor | None]:
            call = self._call
            if call is None:
                raise OptionRefused(
                    f"{self.host.losses}.calculate_log_probs_and_entropy was called by another function than "
                    "get_log_probs_and_entropy; the temperature is not known there"
                )
            if others.get("log_prob_keep_mask") is not None or others.get("true_on_policy"):
                raise OptionRefused(
                    "a mask over the vocabulary, or the host's own mode, changes log-probs; leave it off"
                )
            if logits.shape[0] == 0:
                # A context-parallel rank that holds no token of a response.
                return logits.new_zeros((0,)), logits.new_zeros((0,)) if with_entropy else None
            _check_rows(logits, call.logits)
            call.rows += logits.shape[0]
            shard = vocabulary_shard(self.numerics, tp_group)
            divisor = scoring_temperature(call.temperature, logits.shape[0], logits.device)
            values = token_logprob(logits, tokens, divisor, shard, self.numerics.kernels, tp_group)
            entropy = None
            if with_entropy:
                with torch.set_grad_enabled(torch.is_grad_enabled() and others.get("with_entropy_grad", True)):
                    entropy = token_entropy(logits, call.temperature or 1.0, shard, tp_group)
            return values.unsqueeze(1), entropy

        return calculate_log_probs_and_entropy

    def _policy_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def policy_loss_function(args: Any, batch: Any, *others: Any, **kwargs: Any) -> Any:
            result = original(args, batch, *others, **kwargs)
            tokens = self._compare(args, batch)
            self.compared_tokens += tokens
            loss, reported = result
            counted = torch.tensor(float(tokens), device=loss.device)
            # The host averages what it reports over samples (or tokens): the mean number of compared tokens.
            return loss, reported | {"train_rollout_logprob_compared_tokens": counted}

        return policy_loss_function

    def _compare(self, args: Any, batch: Any) -> int:
        """The number of tokens whose log-prob was held against the rollout's: the old policy's, which sampled them.

        Raises:
            ReceiptMismatch: when one differs in its bits or is not finite, or when there is nothing to compare.
        """
        if not self.receipts_shown:
            raise ReceiptMismatch(
                "no receipt was shown; pass --custom-megatron-before-log-prob-hook-path "
                "megatron_top_plugin.hosts.show_receipts"
            )
        rollout = batch.get("rollout_log_probs") or []
        trained = batch.get("log_probs") or self._logprobs
        cut = importlib.import_module(self.host.losses.rpartition(".")[0] + ".cp_utils").slice_log_prob_with_cp
        tokens = differing = unfinite = 0
        rows = zip(
            trained, rollout, batch["loss_masks"], batch["total_lengths"], batch["response_lengths"], strict=True
        )
        for ours, theirs, mask, total, response in rows if rollout else ():
            taken = cut(mask, total, response).bool().to(ours.device)
            a, b = ours.detach()[taken].float(), theirs.to(ours.device)[taken]
            if b.dtype is not torch.float32:
                raise ReceiptMismatch(f"rollout log-probs are {b.dtype}; the contract needs them as sampled, in fp32")
            tokens += a.numel()
            differing += int(((a.view(torch.int32) != b.view(torch.int32)) | a.isnan() | b.isnan()).sum())
            unfinite += int((~(a.isfinite() & b.isfinite())).sum())
        if differing or unfinite:
            raise ReceiptMismatch(
                f"train_rollout_logprob: {differing} of {tokens} response tokens differ in bits from the rollout's, "
                f"{unfinite} are not finite; compare the receipts of both engines"
            )
        if not rollout:
            raise ReceiptMismatch("train_rollout_logprob: the batch brought no rollout log-probs; nothing was compared")
        return tokens


def _check_version(host: Host) -> None:
    try:
        found = version(host.distribution)
    except PackageNotFoundError:
        if host.versions:
            raise VersionRefused(
                f"{host.distribution}: not installed as a package, so that its version can't be read; pip install "
                f"{host.distribution}=={host.versions[-1]}"
            ) from None
        return
    if host.versions and found not in host.versions and not is_allowed(host.distribution, found):
        raise VersionRefused(
            f"{host.distribution} {found}: its log-prob was read in {', '.join(host.versions)}; install one of these"
        )


def _check_rows(rows: Tensor, logits: Tensor) -> None:
    """Refuse rows that the host has cast or scaled: the first and the last must stand in the model's own logits."""
    whole = logits.reshape(-1, logits.shape[-1])
    if rows.dtype == whole.dtype and rows.shape[-1] == whole.shape[-1]:
        ends = rows.detach()[[0, -1]]
        # NaN stands for NaN here: it is counted where the batch is compared.
        alike = (whole.detach()[:, None, :16] == ends[None, :, :16]) | whole.detach()[:, None, :16].isnan()
        if bool(alike.all(-1).any(0).all()):
            return
    raise ReceiptMismatch(
        "the host changed the logits (a cast or a division) before the contract's log-prob; leave its options for that "
        "off"
    )


def find_host() -> Host:
    """The host that runs in this process.

    Raises:
        OptionRefused: when none does, or both do.
    """
    found = [host for host in HOSTS if host.losses in sys.modules]
    if len(found) != 1:
        names = " and ".join(host.package for host in HOSTS)
        raise OptionRefused(
            f"{len(found)} of the hosts {names} are loaded in this process; name this function in the host's own "
            "--custom-megatron-init-path"
        )
    return found[0]


def install(args: Any, numerics: Numerics) -> HostLogprob:
    """Puts the contract's log-prob into the host of this process.

    Raises:
        Refusal: for a host, a version or an option under which the contract cannot hold.
    """
    check_host_options(args)
    check_temperature(float(args.rollout_temperature))
    logprob = HostLogprob(find_host(), numerics)
    logprob.start()
    return logprob
