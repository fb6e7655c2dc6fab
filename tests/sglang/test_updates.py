"""Weight updates of a live engine.

Theorem: an update that names anything wrong changes no bit of what the engine serves; one that has begun is served only
when it is whole, and is then served exactly; in between every request is refused, and the receipts say why.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_top_launcher.random_model import RandomModel, build
from tests.sglang.rollout import Sample, bits, engine, prompts, sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = prompts(RandomModel().vocab_size, (3, 40, 90))
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def live(tied_model: Path) -> Iterator[Any]:
    with engine(tied_model, tp_size=2, weight_version="0") as made:
        yield made


@pytest.fixture(scope="module")
def old(tied_model: Path) -> dict[str, torch.Tensor]:
    return load_file(tied_model / "model.safetensors")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same sizes and other weights."""
    return build(RandomModel(weight_seed=9), tmp_path_factory.mktemp("other") / "model")


def update(live: Any, tensors: Any, load_format: str | None = None, **more: Any) -> tuple[bool, str]:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    named = list(tensors.items()) if isinstance(tensors, dict) else tensors
    payload = live._serialize_tensors_per_rank(named, None)
    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payload, load_format=load_format, **more)
    success, message = live.loop.run_until_complete(live.tokenizer_manager.update_weights_from_tensor(request, None))
    return success, message


def from_disk(live: Any, folder: Path, **more: Any) -> tuple[bool, str]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=str(folder), **more)
    success, message, _ = live.loop.run_until_complete(live.tokenizer_manager.update_weights_from_disk(request, None))
    return success, message


def receipts(live: Any) -> list[dict[str, Any]]:
    return list(live.get_server_info()["true_on_policy"]["receipts"])


def served(live: Any) -> list[Sample]:
    live.flush_cache()
    return sample(live, PROMPTS, 1.0)


def same(one: list[Sample], other: list[Sample]) -> bool:
    return [(a.tokens, bits(a.logprobs)) for a in one] == [(b.tokens, bits(b.logprobs)) for b in other]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: {}, "no tensor was given"),
        (lambda old: {"model.norm.bias": old[NORM]}, "'model.norm.bias' is none of the model's"),
        (lambda old: {"norm.weight": old[NORM]}, "'norm.weight' is none of the model's"),
        (lambda old: {"lm_head.weight": old["model.embed_tokens.weight"]}, "this model is tied: leave its head out"),
        (lambda old: {NORM: old[NORM][:-1]}, r"model.norm.weight is torch.bfloat16 \[127\], the model holds"),
        (lambda old: {NORM: old[NORM].float()}, r"model.norm.weight is torch.float32 \[128\]"),
        (lambda old: [(NORM, old[NORM]), (NORM, old[NORM])], "model.norm.weight is given twice"),
        (lambda old: {**old, "model.layers.7.mlp.up_proj.weight": old[NORM]}, "layers.7.* is none of the model's"),
    ],
)
def test_a_wrong_tensor_changes_nothing(
    live: Any, old: dict[str, torch.Tensor], change: Callable[[Any], Any], message: str
) -> None:
    import re

    before, shown = served(live), receipts(live)
    success, said = update(live, change(old), weight_version="99")
    assert not success
    assert re.search(message, said) and "nothing was changed" in said and "\n" not in said
    assert receipts(live) == shown
    # the cache was neither flushed nor spoilt: the same requests are served from it
    assert same(sample(live, PROMPTS, 1.0), before)


def test_a_loader_that_goes_past_the_checks_is_refused(live: Any, old: dict[str, torch.Tensor]) -> None:
    success, said = update(live, old, load_format="direct")
    assert not success and "load_format='direct'" in said


@pytest.mark.parametrize("damage", ["no folder", "missing", "surplus", "shape", "cut short", "other sizes", "format"])
def test_a_wrong_folder_changes_nothing(live: Any, other: Path, damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    load_format = None
    if damage != "no folder":
        shutil.copytree(other, folder)
        stored = load_file(folder / "model.safetensors")
        file = folder / "model.safetensors"
        if damage == "missing":
            del stored["model.layers.1.self_attn.k_norm.weight"]
        elif damage == "surplus":
            stored["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(256)
        elif damage == "shape":
            stored[NORM] = torch.ones(64, dtype=torch.bfloat16)
        save_file(stored, file, metadata={"format": "pt"})
        if damage == "cut short":
            file.write_bytes(file.read_bytes()[:-100])
        elif damage == "other sizes":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
        elif damage == "format":
            load_format = "dummy"
    before, shown = served(live), receipts(live)
    success, said = from_disk(live, folder, load_format=load_format, weight_version="99")
    assert not success
    assert "nothing was changed" in said and "\n" not in said
    assert receipts(live) == shown
    assert same(sample(live, PROMPTS, 1.0), before)


def test_an_update_in_buckets_is_served_whole_or_not_at_all(
    live: Any, old: dict[str, torch.Tensor], other: Path
) -> None:
    new = load_file(other / "model.safetensors")
    names = list(new)
    before = served(live)
    assert update(live, {name: new[name] for name in names[:5]}, flush_cache=False, weight_version="7")[0]
    for attempt in range(2):
        with pytest.raises(ValueError, match=f"the weights are a mixture: {len(names) - 5} of {len(names)} tensors"):
            sample(live, PROMPTS, 1.0)
        # neither a flush nor a question makes it whole
        live.flush_cache()
        shown = receipts(live)
        assert {receipt["weight_version"] for receipt in shown} == {"incomplete update"}, attempt
    assert update(live, {name: new[name] for name in names[5:]}, flush_cache=True, weight_version="7")[0]
    served_new = served(live)
    assert not same(served_new, before)
    assert {receipt["weight_version"] for receipt in receipts(live)} == {"7"}
    assert {one.meta["weight_version"] for one in served_new} == {"7"}
    # the same weights from disk, under another version: the same bits
    assert from_disk(live, other, weight_version="8")[0]
    assert same(served(live), served_new)
    digests = receipts(live)[0]["weights"]
    assert update(live, old, weight_version="9")[0]
    assert same(served(live), before)
    assert all(receipts(live)[0]["weights"][name] != digest for name, digest in digests.items() if "proj" in name)


def test_an_update_that_was_broken_off_heals_with_a_whole_one(
    live: Any, old: dict[str, torch.Tensor], other: Path
) -> None:
    before = served(live)
    new = load_file(other / "model.safetensors")
    names = list(new)
    assert update(live, {name: new[name] for name in names[:8]}, flush_cache=False)[0]
    # the sender died and begins again: what came before does not count, even with a flush at its end
    success, said = update(live, {name: old[name] for name in names[4:]}, flush_cache=True)
    assert not success and said.startswith("incomplete update: ")
    with pytest.raises(ValueError, match="the weights are a mixture"):
        sample(live, PROMPTS, 1.0)
    assert update(live, old)[0]
    assert same(served(live), before)


def test_an_update_right_behind_a_request_waits_for_it(live: Any, old: dict[str, torch.Tensor], other: Path) -> None:
    """A bucket that flushes nothing would otherwise change the weights in mid-response."""
    import asyncio

    before = served(live)
    params = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True, "sampling_seed": 3}
    alone = live.generate(input_ids=PROMPTS[1], sampling_params=params, return_logprob=True)

    async def both() -> dict[str, Any]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        asked = asyncio.ensure_future(
            live.async_generate(input_ids=PROMPTS[1], sampling_params=params, return_logprob=True)
        )
        await asyncio.sleep(0.1)
        payload = live._serialize_tensors_per_rank(list(load_file(other / "model.safetensors").items())[:4], None)
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payload, flush_cache=False)
        assert (await live.tokenizer_manager.update_weights_from_tensor(request, None))[0]
        return dict(await asked)

    together = live.loop.run_until_complete(both())
    assert together["output_ids"] == alone["output_ids"]
    logprobs = [[entry[0] for entry in one["meta_info"]["output_token_logprobs"]] for one in (alone, together)]
    assert bits(logprobs[0]) == bits(logprobs[1])
    assert update(live, old)[0]
    assert same(served(live), before)


def test_buckets_of_two_versions_are_no_update(live: Any, old: dict[str, torch.Tensor], other: Path) -> None:
    before = served(live)
    new = load_file(other / "model.safetensors")
    names = list(new)
    assert update(live, {name: new[name] for name in names[:8]}, flush_cache=False, weight_version="11")[0]
    success, _ = update(live, {name: old[name] for name in names[8:]}, flush_cache=True, weight_version="12")
    assert not success
    with pytest.raises(ValueError, match="the weights are a mixture"):
        sample(live, PROMPTS, 1.0)
    assert update(live, old, weight_version="13")[0]
    assert same(served(live), before)


def test_a_payload_that_cannot_be_read_is_refused_on_every_rank(live: Any, old: dict[str, torch.Tensor]) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    before = served(live)
    good = live._serialize_tensors_per_rank(list(old.items()), None)
    for payload in ([good[0], b"no pickle"], good[:1]):
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payload)
        success, said = live.loop.run_until_complete(live.tokenizer_manager.update_weights_from_tensor(request, None))
        assert not success and "nothing was changed" in said, said
    assert same(sample(live, PROMPTS, 1.0), before)


def test_a_checkpoint_engine_names_no_tensors_and_is_refused(live: Any) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput

    request = UpdateWeightsFromIPCReqInput(zmq_handles={})
    success, said = live.loop.run_until_complete(live.tokenizer_manager.update_weights_from_ipc(request, None))
    assert not success and "nothing shows that all have arrived" in said


def test_updates_leave_no_records_behind(live: Any, old: dict[str, torch.Tensor], other: Path) -> None:
    """Stock keeps a record of every call; what is in effect is read from the last one that sets a field."""
    if not hasattr(live.tokenizer_manager, "_config_updates"):
        pytest.skip("this version keeps its records with the configuration of the whole process")
    manager = live.tokenizer_manager
    before = served(live)
    found = []
    for number in range(31, 37, 2):
        assert from_disk(live, other, weight_version=str(number))[0]
        assert update(live, old, weight_version=str(number + 1))[0]
        found.append((len(manager._config_updates), manager.config_value("weight_version")))
    assert found == [(found[0][0], "32"), (found[0][0], "34"), (found[0][0], "36")]
    assert manager.config_value("load_format") == live.server_args.load_format
    assert same(served(live), before)


@pytest.fixture
def broadcast(live: Any) -> Iterator[Callable[..., tuple[bool, str]]]:
    """An update over a process group: this process is its rank 0, the engine's two ranks are 1 and 2."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.utils.network import get_free_port
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    group_name, port = "updates", get_free_port()
    with ThreadPoolExecutor(1) as sender:
        made = sender.submit(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=3,
            rank=0,
            group_name=group_name,
        )
        success, said = live.init_weights_update_group("127.0.0.1", port, 1, 3, group_name, "gloo")
        assert success, said
        group = made.result(timeout=60)

        def send(tensors: dict[str, torch.Tensor], load_format: str | None) -> None:
            values = list(tensors.values())
            if load_format == "flattened_bucket":
                values = [FlattenedTensorBucket(named_tensors=list(tensors.items())).get_flattened_tensor()]
            for value in values:
                torch.distributed.broadcast(value.contiguous(), src=0, group=group)

        def call(
            tensors: dict[str, torch.Tensor], load_format: str | None = None, named: str = group_name, **more: Any
        ) -> tuple[bool, str]:
            sent = sender.submit(send, tensors, load_format) if named == group_name else None
            request = UpdateWeightsFromDistributedReqInput(
                names=list(tensors),
                dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                shapes=[list(tensor.shape) for tensor in tensors.values()],
                group_name=named,
                load_format=load_format,
                **more,
            )
            manager = live.tokenizer_manager
            found: tuple[bool, str] = live.loop.run_until_complete(
                manager.update_weights_from_distributed(request, None)
            )
            if sent is not None:
                sent.result(timeout=60)
            return found

        yield call
        live.destroy_weights_update_group(group_name)


def test_an_update_over_a_group_is_exact_and_a_refused_one_leaves_nobody_waiting(
    live: Any, old: dict[str, torch.Tensor], other: Path, broadcast: Callable[..., tuple[bool, str]]
) -> None:
    before, shown = served(live), receipts(live)
    new = load_file(other / "model.safetensors")
    wrong = (
        ({"model.norm.bias": old[NORM]}, None, "'model.norm.bias' is none of the model's"),
        ({**new, NORM: new[NORM][:-1]}, None, r"model.norm.weight is torch.bfloat16 [127]"),
        ({**new, NORM: new[NORM].float()}, "flattened_bucket", "model.norm.weight is torch.float32 [128]"),
    )
    for tensors, load_format, message in wrong:
        success, said = broadcast(tensors, load_format, weight_version="99")
        assert not success and message in said and "nothing was changed" in said, said
    success, said = broadcast(new, named="another")
    assert not success and "group 'another': no such group; there are ['updates']" in said, said
    assert receipts(live) == shown
    assert same(sample(live, PROMPTS, 1.0), before)

    names = list(new)
    assert broadcast({name: new[name] for name in names[:6]}, flush_cache=False, weight_version="21")[0]
    with pytest.raises(ValueError, match="the weights are a mixture"):
        sample(live, PROMPTS, 1.0)
    bucket = {name: new[name] for name in names[6:]}
    assert broadcast(bucket, "flattened_bucket", flush_cache=True, weight_version="21")[0]
    over_the_group = served(live)
    assert not same(over_the_group, before)
    assert {one.meta["weight_version"] for one in over_the_group} == {"21"}
    assert from_disk(live, other, weight_version="22")[0]
    assert same(served(live), over_the_group)
    assert update(live, old, weight_version="23")[0]
    assert same(served(live), before)
