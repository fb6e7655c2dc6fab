"""Theorem: what reads a person's file answers in time with a value or a refusal of one line, whatever stands there."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from miles_top_launcher._contract.schema.contract import TrueOnPolicyContract
from miles_top_launcher._contract.schema.errors import Refusal
from miles_top_launcher._contract.schema.layout import Layout, RolloutLayout, TrainLayout, check_layout
from miles_top_launcher._contract.schema.profile import ModelShape, check_kernel_set
from miles_top_launcher._contract.schema.weights import hf_weight_names, weight_parts
from miles_top_launcher.diff.finding import as_json, diff_folders, lines
from miles_top_launcher.diff.prune import prune
from miles_top_launcher.model_folder import check_weights, read_folder
from miles_top_launcher.problems import one_line
from miles_top_launcher.prompts import read_prompts
from miles_top_launcher.receipts import check_handshake, read_receipts
from miles_top_launcher.report_file import clear_report
from miles_top_launcher.tiny import TinyModel
from tests.fuzz.effort import fuzz, in_time
from tests.fuzz.spoiled import Place, as_bytes, places, spoiled_bytes, spoiled_document, spoiled_json
from tests.launcher.examples import CONTRACT, LAYOUTS, receipt

CONFIG = TinyModel(num_hidden_layers=1, vocab_size=65).config()
SHAPE = ModelShape.from_config(CONFIG, CONTRACT)
RECEIPT = receipt().model_dump(mode="json")
PROMPT_LINES = [{"input_ids": [1, 2, 3]}, {"input_ids": [64]}, {"prompt": "text"}, {"messages": [{"role": "user"}]}]


def answered(read: Callable[[], Any]) -> Any:
    """What `read` returns, None when it refuses; anything else that it raises fails the test."""
    try:
        with in_time():
            return read()
    except Refusal as refusal:
        line = one_line(refusal)
        assert line and "\n" not in line and line.isprintable()
        return None


@fuzz
@given(spoiled_document(json.loads(CONTRACT.canonical_json())))
def test_a_contract(data: bytes) -> None:
    contract = answered(lambda: TrueOnPolicyContract.from_json(data))
    assert contract is None or TrueOnPolicyContract.from_json(contract.canonical_json()) == contract


@fuzz
@given(*[st.integers(-2, 10) | st.sampled_from([10**4000, 2**63, -(10**30)])] * 5)
def test_a_layout(rollout: int, tp: int, pp: int, cp: int, dp: int) -> None:
    layout = Layout(rollout=RolloutLayout(tp=rollout), train=TrainLayout(tp=tp, pp=pp, cp=cp, dp=dp))
    answered(lambda: check_layout(layout, SHAPE, CONTRACT))


@fuzz
@given(spoiled_json(CONFIG))
def test_a_model_config(config: Any) -> None:
    if isinstance(config, dict):
        shape = answered(lambda: ModelShape.from_config(config, CONTRACT))
        if shape is not None:
            answered(lambda: check_kernel_set(shape, CONTRACT, "cpu"))


def header() -> dict[str, Any]:
    """The safetensors header of the tiny model."""
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in hf_weight_names(SHAPE):
        shape = list(weight_parts(name, SHAPE).shape)
        size = 2
        for one in shape:
            size *= one
        found[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return found


def weights(text: bytes, room: int = 64) -> bytes:
    return struct.pack("<Q", len(text)) + text + b"\0" * room


@fuzz
@given(
    places(spoiled_document(CONFIG)),
    places(spoiled_document(header()).map(weights) | spoiled_bytes(weights(as_bytes(header())))),
)
def test_a_model_folder(config: Place, tensors: Place) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config(folder / "config.json")
        tensors(folder / "model.safetensors")
        answered(lambda: read_folder(folder))
        answered(lambda: check_weights(folder, SHAPE))


@fuzz
@given(
    places(
        st.lists(
            spoiled_document(PROMPT_LINES[0]) | st.sampled_from(PROMPT_LINES).flatmap(spoiled_document), max_size=3
        ).map(b"\n".join)
    )
)
def test_a_prompt_file(prompts: Place) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "prompts.jsonl"
        prompts(path)
        found = answered(lambda: read_prompts(path, None, 65))
        assert found is None or all(0 <= token < 65 for prompt in found for token in prompt)


@fuzz
@given(st.lists(spoiled_json(RECEIPT), min_size=1, max_size=2), st.lists(spoiled_json(RECEIPT), max_size=2))
def test_receipts(rollout: list[Any], train: list[Any]) -> None:
    ours = answered(lambda: read_receipts("rollout", rollout))
    theirs = answered(lambda: read_receipts("trainer", train))
    if ours is not None and theirs is not None:
        answered(lambda: check_handshake(ours, theirs, LAYOUTS[0], CONTRACT))


@fuzz
@given(
    places(spoiled_document({"verdict": "exact", "cells": []})), st.sampled_from(["out.json", "no/out.json", "o" * 300])
)
def test_a_report_path(old: Place, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        old(Path(folder) / "out.json")
        answered(lambda: clear_report(Path(folder) / name, frozenset({"verdict", "cells"})))


def spoil_dumps(data: st.DataObject, files: dict[str, bytes], folder: Path) -> None:
    """Write both dumps with one or two of their files spoiled."""
    wrong = data.draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=2, unique=True))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if name not in wrong:
            path.write_bytes(content)
        elif name.endswith(".json"):
            data.draw(places(spoiled_document(json.loads(content))))(path)
        else:
            data.draw(places(spoiled_tensors(content)))(path)


@st.composite
def spoiled_tensors(draw: st.DrawFn, content: bytes) -> bytes:
    """A safetensors file with its header's JSON, its numbers or any of its bytes spoiled."""
    (size,) = struct.unpack("<Q", content[:8])
    text, numbers = content[8 : 8 + size], bytearray(content[8 + size :])
    match draw(st.sampled_from(["header", "numbers", "bytes"])):
        case "header":
            changed = as_bytes(draw(spoiled_json(json.loads(text))))
            return struct.pack("<Q", len(changed)) + changed + bytes(numbers)
        case "numbers":
            entries = [one for name, one in json.loads(text).items() if name.endswith(("rows", "kept", "digests"))]
            for _ in range(draw(st.integers(1, 6))):
                first, end = draw(st.sampled_from(entries))["data_offsets"]
                if end - first >= 4:
                    at = first + 4 * draw(st.integers(0, (end - first) // 4 - 1))
                    number = draw(st.sampled_from([-(2**31), 2**31 - 1, -1, 0, 1, 3, 6]))
                    numbers[at : at + 4] = struct.pack("<i", number)
            return content[: 8 + size] + bytes(numbers)
        case _:
            return draw(spoiled_bytes(content))


@fuzz
@given(st.data())
def test_dump_folders(dumps: dict[str, bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        spoil_dumps(data, dumps, Path(name))
        finding = answered(lambda: diff_folders(Path(name) / "rollout", Path(name) / "trainer"))
        if finding is not None:
            json.dumps(as_json(finding), allow_nan=False)
            assert all(line.isprintable() for line in lines(finding))
            for dump in (finding.rollout, finding.trainer):
                answered(lambda dump=dump: prune(dump, finding.comparison.first))
