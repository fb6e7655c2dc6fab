"""Settings rendered from the contract: they follow it, and a dtype outside it is refused."""

from __future__ import annotations

import pytest

from contract_schema.schema.errors import OptionRefused, UnknownContract
from contract_schema.schema.layout import TrainLayout
from contract_schema.schema.render import environment, render_megatron, render_sglang
from tests.contract.examples import contract, shape


def test_sglang_on_a_cpu() -> None:
    found = render_sglang(contract(), "cpu")
    assert (found["device"], found["dtype"], found["attention_backend"]) == ("cpu", "bfloat16", "torch_native")
    assert found["enable_deterministic_inference"] is True
    assert found["disable_cuda_graph"] is True
    assert render_sglang(contract(), "cpu", "float32")["dtype"] == "float32"


def test_sglang_on_hopper() -> None:
    found = render_sglang(contract(), "cuda")
    assert (found["attention_backend"], found["page_size"], found["disable_custom_all_reduce"]) == ("fa3", 1, True)
    assert "disable_cuda_graph" not in found


def test_megatron_follows_shape_layout_and_dtype() -> None:
    found = render_megatron(contract(), shape(), TrainLayout(tp=2, pp=4, cp=2), "bfloat16")
    assert (found["num_layers"], found["kv_channels"], found["num_query_groups"]) == (4, 16, 8)
    assert (found["tensor_model_parallel_size"], found["pipeline_model_parallel_size"]) == (2, 4)
    assert (found["params_dtype"], found["bf16"], found["pipeline_dtype"]) == ("bfloat16", True, "float32")
    full = render_megatron(contract(), shape(), TrainLayout(), "float32")
    assert (full["params_dtype"], full["bf16"], full["pipeline_dtype"]) == ("float32", False, "float32")
    assert full["use_cpu_initialization"] is True
    assert render_megatron(contract(), shape(), TrainLayout(), device="cuda")["use_cpu_initialization"] is False


def test_a_torch_dtype_is_taken_by_name() -> None:
    import torch

    assert render_sglang(contract(), "cpu", torch.float32)["dtype"] == "float32"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float16"), ("cpu", "auto"), ("cuda", "float32")])
def test_a_dtype_outside_the_kernel_set_is_refused(device: str, dtype: str) -> None:
    with pytest.raises(OptionRefused, match=f"dtype='{dtype}': the (cpu|hopper) kernel set of contract"):
        render_sglang(contract(), device, dtype)


def test_a_device_without_kernels_is_refused() -> None:
    for render in (render_sglang, environment):
        with pytest.raises(UnknownContract, match="no kernel set for device 'xpu'"):
            render(contract(), "xpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_variable_has_its_reason(device: str) -> None:
    found = environment(contract(), device)
    assert len({setting.name for setting in found}) == len(found)
    assert all(setting.name and setting.value and setting.reason for setting in found)
    names = {setting.name: setting.value for setting in found}
    assert names["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    assert ("NCCL_NVLS_ENABLE" in names) == (device == "cuda")
