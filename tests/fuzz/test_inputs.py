"""What a person gives is read, or refused by one Refusal: prompt files, model folders, report paths."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_top_launcher._contract.schema.errors import Refusal
from miles_top_launcher._contract.schema.profile import ModelShape
from miles_top_launcher._contract.schema.weights import hf_weight_names, weight_parts
from miles_top_launcher.model_folder import check_shape_for, check_weights, pick_contract, read_folder
from miles_top_launcher.prompts import check_lengths, read_prompts
from miles_top_launcher.random_model import RandomModel
from miles_top_launcher.report_file import clear_report
from tests.fuzz.drawn import changed_bytes, changed_json, json_bytes, json_files, odd_values
from tests.fuzz.examples import fuzzed, refused_or
from tests.fuzz.files import LARGE, ODD_FILES, file_or_odd, fill, paths, put, spoiled
from tests.launcher.examples import CONTRACT

CONFIG = RandomModel().config()
LINES: tuple[dict[str, Any], ...] = (
    {"input_ids": [1, 2, 3]},
    {"input_ids": [1002], "note": "kept out"},
    {"prompt": "hello"},
    {"messages": [{"role": "user", "content": "hello"}]},
)


def header(config: dict[str, Any]) -> dict[str, Any]:
    """The safetensors header of a model's weights."""
    shape = ModelShape.from_config(config, CONTRACT)
    entries, end = {}, 0
    for name in hf_weight_names(shape):
        sizes = list(weight_parts(name, shape).shape)
        length = 2 * sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [end, end + length]}
        end += length
    return entries


def weights(head: bytes, data: int = 0) -> bytes:
    """A safetensors file whose data are left out but for `data` bytes."""
    return struct.pack("<Q", len(head)) + head + bytes(data)


HEADER = header(CONFIG)
END = max(entry["data_offsets"][1] for entry in HEADER.values())
FOLDER = {"config.json": json_bytes(CONFIG), "model.safetensors": weights(json_bytes(HEADER), END)}


def read_model(folder: Path) -> None:
    """What a plan reads of a model folder."""
    config = read_folder(folder)
    for name in (None, CONTRACT.name):
        contract = pick_contract(name, config)
        check_weights(folder, check_shape_for(config, contract, "cpu"))


def test_the_folder_that_is_changed_is_taken_as_it_is(tmp_path: Path) -> None:
    read_model(fill(tmp_path / "model", FOLDER))


@fuzzed(60)
@given(files=spoiled(FOLDER))
def test_a_model_folder_is_taken_or_refused(files: dict[str, str | bytes], tmp_path: Path) -> None:
    folder = fill(tmp_path / "model", files)
    refused_or(lambda: read_model(folder))


@fuzzed(80)
@given(data=json_files(CONFIG))
def test_a_config_is_taken_or_refused(data: bytes, tmp_path: Path) -> None:
    folder = fill(tmp_path / "model", {"config.json": data})
    refused_or(lambda: read_model(folder))


@fuzzed(80)
@given(head=json_files(HEADER), size=st.sampled_from([None, None, 0, 7, 2**31, 2**63, 2**64 - 1]))
def test_a_safetensors_header_is_taken_or_refused(head: bytes, size: int | None, tmp_path: Path) -> None:
    data = weights(head) if size is None else struct.pack("<Q", size) + head
    folder = fill(tmp_path / "model", {"config.json": FOLDER["config.json"], "model.safetensors": data})
    refused_or(lambda: read_model(folder))


def test_a_header_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model", {"config.json": FOLDER["config.json"], "model.safetensors": LARGE})
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 39))
    assert "header" in str(refused_or(lambda: read_model(folder)))


@st.composite
def prompt_files(draw: st.DrawFn) -> bytes:
    """JSON lines: some valid, some changed, some noise."""
    lines = [
        draw(
            st.one_of(
                st.sampled_from(LINES).map(json_bytes),
                st.sampled_from(LINES).flatmap(changed_json).map(json_bytes),
                st.sampled_from(LINES).flatmap(lambda line: changed_bytes(json_bytes(line))),
                odd_values().map(json_bytes),
            )
        )
        for _ in range(draw(st.integers(0, 4)))
    ]
    return draw(st.sampled_from([b"\n", b"\r\n", b"\n\n"])).join(lines)


@fuzzed(150)
@given(what=file_or_odd(prompt_files()))
def test_a_prompt_file_is_taken_or_refused(what: str | bytes, tmp_path: Path) -> None:
    path = put(tmp_path / "prompts.jsonl", what)
    found = refused_or(lambda: read_prompts(path, None, 1003))
    if isinstance(found, tuple):
        assert found
        assert all(prompt and all(type(token) is int and 0 <= token < 1003 for token in prompt) for prompt in found)
        refused_or(lambda: check_lengths(found, 8, 4096))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a word tokenizer whose chat template wants two fields."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"hello": 3, "user": 5, "?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.role }} {{ turn.content }}{% endfor %}"
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    # the first one imports most of transformers, which is no example's time
    AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return folder


@fuzzed(60)
@given(data=st.data())
def test_texts_and_chats_are_tokenized_or_refused(data: st.DataObject, tmp_path: Path, tokenizer_folder: Path) -> None:
    line = data.draw(changed_json(data.draw(st.sampled_from(LINES[2:]))))
    path = put(tmp_path / "prompts.jsonl", json_bytes(line))
    refused_or(lambda: read_prompts(path, tokenizer_folder, 1003))


KEYS = frozenset({"verdict", "cells"})
REPORT = {"verdict": "exact", "cells": []}


@fuzzed(80)
@given(what=file_or_odd(json_files(REPORT)))
def test_only_an_older_report_makes_way_for_a_new_one(what: str | bytes, tmp_path: Path) -> None:
    path = put(tmp_path / "out.json", what)
    there = path.is_symlink() or path.exists()
    found = refused_or(lambda: clear_report(path, KEYS))
    if found is None and there:
        value = json.loads(what)
        entries = value if isinstance(value, list) else [value]
        assert entries
        assert all(entry.keys() >= KEYS for entry in entries)
    assert (path.is_symlink() or path.exists()) is (there and found is not None)


@fuzzed(40)
@given(data=st.data())
def test_a_path_that_holds_no_file_is_refused(data: st.DataObject, tmp_path: Path) -> None:
    path = data.draw(paths(tmp_path))
    (tmp_path / "plain").write_bytes(json_bytes(LINES[0]))
    refused_or(lambda: read_prompts(path, None, 1003))
    refused_or(lambda: read_model(path))
    refused_or(lambda: clear_report(path, KEYS))


def test_every_odd_file_is_one_that_no_reader_takes(tmp_path: Path) -> None:
    """The list is drawn from above by chance; here each of it is tried in each place."""
    for what in ODD_FILES:
        for name in FOLDER:
            folder = fill(tmp_path / "model", {**FOLDER, name: what})
            assert isinstance(refused_or(partial(read_model, folder)), Refusal), (what, name)
