"""What a trainer's processes talk over, by the device they run on."""

from __future__ import annotations

#: On a GPU what lies on the CPU, such as objects and token counts, still goes over gloo.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
