"""What the contract renders is taken by the installed engine's own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract_schema.schema.options import dataclass_defaults
from contract_schema.schema.render import render_sglang
from miles_top_launcher.random_model import RandomModel, build
from tests.contract.examples import contract


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_installed_sglang_takes_the_rendered_arguments(tmp_path: Path, dtype: str) -> None:
    """Not our class: in a process without a contract. Its own resolution leaves what the contract sets as it is."""
    from sglang.srt import server_args as stock

    wanted: dict[str, Any] = render_sglang(contract(), "cpu", dtype)
    lists = (stock.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, stock.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND)
    for choices in lists:  # as the plugin does around it
        choices.append(wanted["attention_backend"])
    try:
        made = stock.ServerArgs(model_path=str(build(RandomModel(), tmp_path / "model")), **wanted)
        if hasattr(made, "resolve_once"):
            from sglang.srt.arg_groups.overrides import resolution_result

            made.resolve_once()
            found = {field: resolution_result(made, field) for field in wanted}
        else:
            found = {field: getattr(made, field) for field in wanted}
    finally:
        for choices in lists:
            choices.remove(wanted["attention_backend"])
    assert found == wanted


def test_every_rendered_argument_of_a_gpu_is_one_of_the_installed_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    assert set(render_sglang(contract(), "cuda")) <= set(dataclass_defaults(ServerArgs))
