"""Every wrong input is one line on standard error and exit code 2, in seconds: no engine was started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher._contract.schema.errors import Refusal
from miles_top_launcher.cli import app
from miles_top_launcher.exit_codes import REFUSED
from miles_top_launcher.plan import make_plan
from miles_top_launcher.random_model import RandomModel, build
from tests.launcher.examples import request, write_lines

FLAGS = {
    "missing model": (["--model", "/no/such/folder"], "/no/such/folder: no such folder"),
    "unknown contract": (
        ["--contract", "nope_v1"],
        "contract 'nope_v1' is unknown; known: qwen3_dense_true_on_policy_v1",
    ),
    "TP x CP does not divide the KV heads": (["--train-tp", "4", "--cp", "4"], "tp_times_cp_divides_kv_heads"),
    "PP beyond the layers": (["--pp", "3"], "pp_within_layers: pp=3 is more than num_hidden_layers=2"),
    "rollout TP that is no divisor": (["--rollout-tp", "3"], "rollout tp=3"),
    "layout of zero": (["--dp", "0"], "size_positive: dp=0"),
    "negative temperature": (["--temperature", "-0.5"], "--temperature=-0.5"),
    "temperature that is no number": (["--temperature", "nan"], "--temperature=nan"),
    "endless temperature": (["--temperature", "inf"], "--temperature=inf"),
    "temperature that SGLang takes as greedy": (["--temperature", "1e-7"], "--temperature=1e-07: allowed: 0 (greedy)"),
    "temperature beyond fp32": (["--temperature", "1e300"], "--temperature=1e+300"),
    "more ranks than a machine": (["--dp", "100000"], "more processes than the 64"),
    "more prompts than memory": (["--num-prompts", "100000000"], "--num-prompts 100000000: must be 1 to"),
    "report on a device": (["--json", "/dev/null"], "--json /dev/null: exists and is no report"),
    "prompts on a device": (["--prompts", "/dev/zero"], "--prompts /dev/zero: is no regular file"),
    "no new tokens": (["--max-new-tokens", "0"], "--max-new-tokens 0"),
    "no prompts": (["--num-prompts", "0"], "--num-prompts 0"),
    "too many new tokens": (["--max-new-tokens", "4096"], "max_position_embeddings 4096"),
    "negative seed": (["--seed", "-1"], "--seed -1"),
    "report in no folder": (
        ["--json", "/no/such/folder/out.json"],
        "--json /no/such/folder/out.json: can't be written",
    ),
    "report on a folder": (["--json", "/tmp"], "--json /tmp: is a folder"),
    "matrix with a layout": (["--matrix", "small", "--pp", "2"], "--matrix small names its own layouts; drop --pp"),
    "unknown matrix": (["--matrix", "huge"], "--matrix"),
    "unknown dtype": (["--dtype", "float16"], "--dtype"),
    "unknown cut": (["--cp-layout", "spiral"], "--cp-layout"),
    "number that is none": (["--num-prompts", "many"], "--num-prompts"),
    "kernels of a GPU, no GPU": (
        ["--kernel-set", "hopper", "--model", "random-qwen3-0.6b"],
        "--kernel-set hopper: the layout has up to 1 ranks, a GPU each, and torch finds 0 GPUs here",
    ),
    "heads that the GPU's kernels do not take": (
        ["--kernel-set", "hopper"],
        "o_proj (num_attention_heads x head_dim) has segments of K=32, which do not divide by the hopper kernels' step",
    ),
    "unknown kernel set": (["--kernel-set", "tpu"], "--kernel-set"),
    "prompts of no tokens": (["--prompt-tokens", "0"], "--prompt-tokens 0: must be 1 to"),
    "a length for prompts that have theirs": (
        ["--prompt-tokens", "9", "--prompts", "p.jsonl"],
        "--prompt-tokens 9: the prompts of --prompts have their own lengths",
    ),
    "unknown flag": (["--no-such-flag"], "--no-such-flag"),
    "missing prompt file": (["--prompts", "/no/such/file.jsonl"], "/no/such/file.jsonl: can't be read"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_wrong_flag_is_one_line_and_exit_2(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, expected = FLAGS[name]
    with pytest.raises(SystemExit) as stopped:
        app(["verify", *arguments])
    assert stopped.value.code == REFUSED
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("refused: ")
    assert expected in output.err


def test_the_bare_command_shows_its_help_and_is_no_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        app([])
    assert stopped.value.code == REFUSED
    output = capfd.readouterr()
    assert "verify" in output.out
    assert output.err == ""


PROMPTS = {
    "broken JSON": ('{"input_ids": [1, 2', "not JSON"),
    "nested beyond reading": ('{"input_ids": ' + "[" * 100_000, "not usable as JSON"),
    "a number beyond reading": ('{"input_ids": [' + "1" * 5000 + "]}", "not usable as JSON"),
    "no object": ("[1, 2]", "a list where an object"),
    "no field": ('{"text": "x"}', "has none of input_ids, prompt, messages"),
    "two fields": ('{"input_ids": [1], "prompt": "x"}', "has input_ids and prompt"),
    "empty prompt": ('{"input_ids": []}', "empty prompt"),
    "no list": ('{"input_ids": 7}', "input_ids is a int"),
    "token id above the vocabulary": (
        '{"input_ids": [1, 1003]}',
        "input_ids[1] is 1003, outside the vocabulary 0..1002",
    ),
    "negative token id": ('{"input_ids": [-1]}', "input_ids[0] is -1"),
    "token id that is no integer": ('{"input_ids": [1.5]}', "input_ids[0] is 1.5, not an integer"),
    "token id that is a truth value": ('{"input_ids": [true]}', "input_ids[0] is True, not an integer"),
    "text without a tokenizer": ('{"prompt": "hello"}', "prompt needs a tokenizer and the tiny model has none"),
    "chat without a tokenizer": ('{"messages": [{"role": "user", "content": "hi"}]}', "messages needs a tokenizer"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_wrong_prompt_names_file_and_line(name: str, tmp_path: Path) -> None:
    line, expected = PROMPTS[name]
    path = write_lines(tmp_path, '{"input_ids": [1]}', line)
    with pytest.raises(Refusal) as refused:
        make_plan(request(prompts=path), tmp_path)
    assert f"{path}:2: " in str(refused.value)
    assert expected in str(refused.value)


def test_a_prompt_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no prompt in it"):
        make_plan(request(prompts=write_lines(tmp_path, "", "  ")), tmp_path)


def test_more_prompts_than_the_file_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"--num-prompts 3: .* holds 1 prompts only"):
        make_plan(request(prompts=write_lines(tmp_path, '{"input_ids": [1]}'), num_prompts=3), tmp_path)


def _edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}), encoding="utf-8")


def _edit_weights(folder: Path, change: Callable[[Any], Any]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file({name: change(weight) for name, weight in weights.items()}, folder / "model.safetensors")


def _drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "wrong architecture": (
        lambda folder: _edit_config(folder, architectures=["LlamaForCausalLM"]),
        "architecture 'LlamaForCausalLM' has no contract",
    ),
    "two architectures": (lambda folder: _edit_config(folder, architectures=["A", "B"]), "exactly one is needed"),
    "attention bias": (lambda folder: _edit_config(folder, attention_bias=True), "attention_bias=True"),
    "layer types that are no list": (lambda folder: _edit_config(folder, layer_types=5), "layer_types=5"),
    "a number beyond floats": (lambda folder: _edit_config(folder, rms_norm_eps=10**400), "rms_norm_eps=1000"),
    "more layers than any model": (
        lambda folder: _edit_config(folder, num_hidden_layers=10**9, layer_types=None),
        "num_hidden_layers=1000000000; at most",
    ),
    "a size that is not that of the weights": (
        lambda folder: _edit_config(folder, intermediate_size=512),
        "its config needs BF16 or F32 [512, 128]",
    ),
    "weights of another type": (lambda folder: _edit_weights(folder, lambda w: w.half()), "is F16"),
    "weights without their last bytes": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-2]),
        "bytes of data, the file holds",
    ),
    "a tensor in two files": (
        lambda folder: shutil.copy(folder / "model.safetensors", folder / "more.safetensors"),
        "is in two safetensors files",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no file"),
    "config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors file"),
    "weights cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"1234567"),
        "no readable safetensors",
    ),
    "a tensor is missing": (
        _drop_tensor,
        "1 tensors are missing from its safetensors files, the first is model.layers.1.mlp.up_proj",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wrong_model_folder_is_refused(name: str, tmp_path: Path) -> None:
    spoil, expected = FOLDERS[name]
    folder = build(RandomModel(), tmp_path / "model")
    spoil(folder)
    with pytest.raises(Refusal) as refused:
        make_plan(request(model=str(folder)), tmp_path)
    assert expected in str(refused.value)


def test_a_wrong_architecture_is_refused_under_a_named_contract(tmp_path: Path) -> None:
    folder = build(RandomModel(), tmp_path / "model")
    _edit_config(folder, architectures=["LlamaForCausalLM"])
    with pytest.raises(Refusal, match="LlamaForCausalLM"):
        make_plan(request(model=str(folder), contract="qwen3_dense_true_on_policy_v1"), tmp_path)


def test_an_environment_that_contradicts_the_contract_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    with pytest.raises(Refusal, match="environment SGLANG_PLUGINS='another': the contract needs"):
        make_plan(request(), tmp_path)


def test_the_installed_command_refuses_before_it_imports_an_engine() -> None:
    started = time.monotonic()
    command = [sys.executable, "-X", "importtime", "-c", "from miles_top_launcher.cli import app; app()"]
    result = subprocess.run([*command, "verify", "--pp", "3"], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == REFUSED
    assert "pp_within_layers" in result.stderr
    for engine in ("torch", "sglang", "megatron", "transformers"):
        assert f" {engine}\n" not in result.stderr, f"{engine} was imported"
    assert time.monotonic() - started < 60
