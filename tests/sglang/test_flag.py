"""The flag's ways in, what it sets, and what it refuses before any engine starts: one line, exit code 2."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang.srt import server_args as stock
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_top_plugin import settings
from sglang_top_plugin._contract.schema.errors import OptionRefused
from sglang_top_plugin._contract.schema.registry import load_contract
from sglang_top_plugin.flag import contract_name
from tests.sglang.rollout import CONTRACT

load_plugins()


def _arguments(model: Path, **more: Any) -> dict[str, Any]:
    return {"model_path": str(model), "device": "cpu", "true_on_policy_contract": CONTRACT} | more


def test_keyword_sets_what_the_contract_decides(tied_model: Path) -> None:
    made = ServerArgs(**_arguments(tied_model))
    assert contract_name(made) == CONTRACT
    assert (made.attention_backend, made.sampling_backend, made.dtype) == ("torch_native", "pytorch", "bfloat16")
    assert made.enable_deterministic_inference
    assert not made.disable_radix_cache


def test_the_jobs_environment_names_the_contract_where_a_host_drops_it(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stock = ServerArgs(model_path=str(tied_model), device="cpu")
    monkeypatch.setenv("TRUE_ON_POLICY_CONTRACT", CONTRACT)
    fields = {"model_path": str(tied_model), "device": "cpu"}
    assert contract_name(ServerArgs(**fields)) == CONTRACT
    assert contract_name(prepare_server_args(["--model-path", str(tied_model), "--device", "cpu"])) == CONTRACT
    # An object that was made before the plugin was loaded.
    with pytest.raises(SystemExit):
        stock.check_server_args()
    assert "these ServerArgs were made before the plugin was loaded" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        ServerArgs(**fields, true_on_policy_contract="another")
    assert f"environment TRUE_ON_POLICY_CONTRACT names '{CONTRACT}'" in capfd.readouterr().err


def test_a_host_loads_the_plugin_or_ends(tied_model: Path) -> None:
    """SGLang's own loader would go on without it."""
    for allowed, status in ((None, 0), ("another_plugin", 2)):
        environment = dict(os.environ) | ({"SGLANG_PLUGINS": allowed} if allowed is not None else {})
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", "from sglang_top_plugin.hosts import load; load()"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == status, done.stderr


def test_the_name_survives_pickling(tied_model: Path) -> None:
    made = pickle.loads(pickle.dumps(ServerArgs(**_arguments(tied_model))))
    assert contract_name(made) == CONTRACT
    settings.recheck(made, load_contract(CONTRACT))


def test_command_line(tied_model: Path) -> None:
    line = ["--model-path", str(tied_model), "--device", "cpu", "--dtype", "float32"]
    made = prepare_server_args([*line, "--true-on-policy-contract", CONTRACT])
    assert contract_name(made) == CONTRACT
    assert made.dtype == "float32"
    assert contract_name(prepare_server_args([*line, "--attention-backend", "torch_native"])) is None


def test_the_engines_lists_are_left_as_they_were(tied_model: Path) -> None:
    ServerArgs(**_arguments(tied_model))
    assert "torch_native" not in stock.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert "torch_native" not in stock.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND


def test_one_entry_a_rank_binds_threads(tied_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    ServerArgs(**_arguments(tied_model, tp_size=4))
    assert len(os.environ["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 4
    ServerArgs(**_arguments(tied_model, tp_size=2))
    assert len(os.environ["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    ServerArgs(**_arguments(tied_model))
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ


def test_a_process_started_from_one_with_more_ranks_binds_its_own(tied_model: Path) -> None:
    """The variable outlives the engine it was set for, and a child process inherits it."""
    code = (
        "import os, sys; from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import ServerArgs\n"
        f"ServerArgs(**{_arguments(tied_model)!r})\n"
        "print('bound:', os.environ.get('SGLANG_CPU_OMP_THREADS_BIND'))"
    )
    for ours, expected in (("0|1", "bound: None"), (None, "bound: 0|1")):
        environment = os.environ | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        if ours is not None:
            environment["SGLANG_TOP_PLUGIN_OMP_THREADS_BIND"] = ours
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert expected in done.stdout


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"true_on_policy_contract": "qwen3_dense_true_on_policy_v9"}, "qwen3_dense_true_on_policy_v9"),
        ({"attention_backend": "triton"}, "attention_backend"),
        ({"dtype": "float16"}, "float16"),
        ({"quantization": "fp8"}, "quantization"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm"),
        ({"enable_lora": True}, "enable_lora"),
        ({"enable_mixed_chunk": True}, "enable_mixed_chunk"),
        ({"enable_torch_compile": True}, "enable_torch_compile"),
        ({"tp_size": 3}, "3"),
        ({"model_path": "/no/such/folder"}, "/no/such/folder"),
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"device": "cuda"}, "device='cuda': kernel set 'hopper' is not available"),
        ({"context_length": 4097}, "context_length=4097"),
        ({"allow_auto_truncate": True}, "allow_auto_truncate"),
        ({"smg_grpc_mode": True}, "smg_grpc_mode"),
        ({"preferred_sampling_params": '{"temperature": 1e-7}'}, "temperature=1e-07"),
        ({"preferred_sampling_params": "[1]"}, "preferred_sampling_params"),
    ],
)
def test_refused_with_one_line(
    tied_model: Path, capfd: pytest.CaptureFixture[str], changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        ServerArgs(**_arguments(tied_model, **changed))
    assert caught.value.code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("true-on-policy:")]
    assert len(lines) == 1
    assert named in lines[0]


def test_a_stock_engine_after_a_contracts_gets_its_own_environment(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("SGLANG_PLUGINS", "SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_CPU_OMP_THREADS_BIND")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    ServerArgs(**_arguments(tied_model, tp_size=2))
    assert all(name in os.environ for name in names)
    ServerArgs(model_path=str(tied_model), device="cpu", attention_backend="torch_native")
    assert not [name for name in names if name in os.environ]


@pytest.mark.engine
def test_arguments_that_came_pickled_bring_the_hooks_and_other_plugins_hooks_are_refused(
    tied_model: Path, tmp_path: Path
) -> None:
    """Hosts make the arguments in one process and start the server in another, which never constructs any."""
    (tmp_path / "arguments").write_bytes(pickle.dumps(ServerArgs(**_arguments(tied_model))))
    code = (
        "import os, pickle, sys; from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "made = pickle.load(open(sys.argv[1], 'rb'))\n"
        "getattr(made, 'resolve_once', lambda: None)(); made.check_server_args()\n"
        "from sglang_top_plugin.frontend import FRONTEND_HOOKS\n"
        "print('hooks:', {hook.in_place() for hook in FRONTEND_HOOKS}, os.environ['SGLANG_PLUGINS'])\n"
        "target = 'sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output'\n"
        "HookRegistry.register(target, print, HookType.BEFORE)\n"
        "made.check_server_args(); print('went on')"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "arguments")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "hooks: {True} true_on_policy" in done.stdout
    assert done.returncode == 2, done.stderr
    assert "went on" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("true-on-policy:")]
    assert "TokenizerManager._handle_batch_output of another plugin" in line


@pytest.mark.parametrize(
    "name", ["SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_USE_CPU_ENGINE", "SGLANG_RUST_SERVER", "SGLANG_PLUGINS"]
)
def test_refused_environment(
    tied_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as caught:
        ServerArgs(**_arguments(tied_model))
    assert caught.value.code == 2
    assert name in capfd.readouterr().err


def test_a_flag_put_on_finished_arguments_is_refused(tied_model: Path) -> None:
    made = ServerArgs(model_path=str(tied_model), device="cpu", attention_backend="torch_native", dtype="bfloat16")
    made.__dict__["true_on_policy_contract"] = CONTRACT
    with pytest.raises(OptionRefused, match="constructor"):
        settings.recheck(made, load_contract(CONTRACT))


@pytest.mark.engine
def test_the_server_command_exits_with_2(tied_model: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(tied_model)),
            *("--device", "cpu", "--true-on-policy-contract", CONTRACT, "--quantization", "fp8"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "quantization" in line and line.startswith("true-on-policy:")]
    assert "Traceback" not in done.stderr
