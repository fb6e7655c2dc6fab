"""Rules of a launch: each can fail, names itself and offers what works; what passes satisfies the engines' checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_top_launcher._contract.schema.errors import LayoutRefused, Refusal
from miles_top_launcher._contract.schema.layout_rules import LAYOUT_RULES, LENGTH_REASON, LENGTH_RULE, LENGTH_SAYS
from miles_top_launcher.launch.batch_rules import BATCH_RULES
from miles_top_launcher.launch.cluster_rules import CLUSTER_RULES, PLACEMENT_RULES
from miles_top_launcher.launch.facts import LaunchFacts
from miles_top_launcher.launch.formats import FORMATS
from miles_top_launcher.launch.plan import Plan, make_plan
from miles_top_launcher.launch.request import LaunchRequest
from miles_top_launcher.launch.rules import MENDED, broken_rule, check_launch, nearest_requests
from miles_top_launcher.launch.sources import make_request
from miles_top_launcher.profiles.recognise import recognise

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")
OWN = (*CLUSTER_RULES, *PLACEMENT_RULES, *BATCH_RULES)
NAMES = {rule.name for rule in (*LAYOUT_RULES, *OWN)} | {LENGTH_RULE}
KNOWN = recognise("Qwen3-8B")


def request(**fields: Any) -> LaunchRequest:
    return LaunchRequest.model_validate({"model": "Qwen3-8B", **fields})


def facts(**fields: Any) -> LaunchFacts:
    return LaunchFacts(request(**fields), KNOWN.shape, KNOWN.contract)


def refusal(**fields: Any) -> str:
    with pytest.raises(LayoutRefused) as error:
        make_plan(request(**fields))
    return str(error.value)


TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
ENGINE = "rollout_num_gpus_per_engine"

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 0}, "cluster_size_positive: --nodes 0; use 1 to 65536"),
    ({TP: -1}, "cluster_size_positive: --tensor-model-parallel-size -1;"),
    ({"nodes": 60000, "gpus_per_node": 8}, "cluster_size_positive: --nodes 60000 x --gpus-per-node 8 is more than"),
    (
        {"rollout_num_gpus": 4},
        "colocation_shares_all_gpus: --rollout-num-gpus 4 with --colocate, where the rollout has",
    ),
    (
        {"colocate": False},
        "rollout_has_gpus_of_its_own: --no-colocate without --rollout-num-gpus; say how many of the 8",
    ),
    (
        {"colocate": False, "rollout_num_gpus": 8},
        "rollout_has_gpus_of_its_own: --rollout-num-gpus 8 of 8 GPUs leaves the trainer 0; use 1 to 7",
    ),
    (
        {"colocate": False, "nodes": 2, "rollout_num_gpus": 4},
        "rollout_takes_whole_nodes: --rollout-num-gpus 4 on 2 machines is no multiple of --gpus-per-node 8",
    ),
    (
        {TP: 3},
        "tp_divides_segments: train tp=3 does not divide the contract's 8 row-parallel segments; use 1, 2, 4, 8; "
        "nearest that work: --tensor-model-parallel-size 4; or --tensor-model-parallel-size 2; or",
    ),
    (
        {ENGINE: 16, "nodes": 2},
        "tp_divides_segments: rollout tp=16 does not divide the contract's 8 row-parallel segments; use 1, 2, 4, 8; "
        "nearest that work: --rollout-num-gpus-per-engine 8; or --rollout-num-gpus-per-engine 4; or",
    ),
    (
        {TP: 4, CP: 4, "nodes": 2},
        "tp_times_cp_divides_kv_heads: tp=4 x cp=4 = 16 does not divide num_key_value_heads=8, and KV heads are never "
        "replicated; lower tp or cp; nearest that work: --tensor-model-parallel-size 2; or --context-parallel-size 2;",
    ),
    (
        {PP: 37, "gpus_per_node": 37, "rollout_batch_size": 37},
        "pp_within_layers: pp=37 is more than num_hidden_layers=36; use at most 36; nearest that work: "
        "--pipeline-model-parallel-size 1",
    ),
    (
        {PP: 8},
        "pp_divides_layers: pp=8 does not divide num_hidden_layers=36; use a divisor of 36; nearest that work: "
        "--pipeline-model-parallel-size 4; or",
    ),
    (
        {TP: 4, "gpus_per_node": 6, "rollout_batch_size": 12},
        "model_parallel_divides_world: tp=4 x pp=1 x cp=1 = 4 does not divide the trainer's 6 GPUs; nearest that work: "
        "--tensor-model-parallel-size 2; or",
    ),
    (
        {ENGINE: 4, "nodes": 2, "gpus_per_node": 6, "rollout_batch_size": 12},
        "engine_within_node: --rollout-num-gpus-per-engine 4 on machines of 6 GPUs would reach over two machines; use "
        "a divisor of 6; nearest that work: --rollout-num-gpus-per-engine 2;",
    ),
    (
        {ENGINE: 4, "gpus_per_node": 6, "rollout_batch_size": 12},
        "engines_divide_rollout_gpus: --rollout-num-gpus-per-engine 4 does not divide the rollout's 6 GPUs; use a "
        "divisor of 6; nearest that work: --rollout-num-gpus-per-engine 2;",
    ),
    (
        {"model": "Qwen3-32B"},
        "trainer_state_fits: weights, gradients and optimiser take 228.8 GiB of a GPU's 139.8; raise tensor- or "
        "pipeline-parallel size, or give --optimizer-cpu-offload; nearest that work: --pipeline-model-parallel-size 4; "
        "or --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2; or --tensor-model-parallel-size 4",
    ),
    (
        {"model": "Qwen3-32B", "gpus_per_node": 1},
        "no layout of this cluster works: use other GPUs or machines",
    ),
    (
        {"sglang_mem_fraction_static": 0.12},
        "kv_cache_holds_a_request: --sglang-mem-fraction-static 0.12 of 139.8 GiB, less 15.3 GiB of weights, holds "
        "11065 tokens of 147456 bytes, and one request has up to 16384; raise it or --rollout-num-gpus-per-engine, or ",
    ),
    (
        {CP: 2, "cp_layout": "contiguous"},
        "hosts_cut_in_zigzag: --cp-layout contiguous with cp=2: Megatron's and Miles'",
    ),
    (
        {"rollout_max_context_len": 40961},
        "context_within_positions: --rollout-max-context-len 40961: the model has 40960 positions; use 2 to 40960",
    ),
    (
        {"rollout_max_response_len": 16384},
        "response_within_context: --rollout-max-response-len 16384 within --rollout-max-context-len 16384 leaves no",
    ),
    (
        {CP: 2, "rollout_max_context_len": 10002},
        "cp_cuts_sequence: --rollout-max-context-len 10002 is no multiple of 4, which cp=2 with cp_layout=zigzag "
        "needs; use 10004 or 10000",
    ),
    (
        {"global_batch_size": 100},
        "global_batch_divides_samples: --global-batch-size 100 does not divide the 256 samples of a rollout (32 "
        "prompts x 8); nearest that work: 128, 64, 32",
    ),
    ({"n_samples_per_prompt": 0}, "global_batch_divides_samples: --n-samples-per-prompt 0; use 1 to"),
    (
        {"gpus_per_node": 6},
        "data_parallel_divides_batch: a rollout of 256 samples does not divide by dp=6; nearest that work: "
        "--rollout-batch-size 33 or 30",
    ),
    (
        {"nodes": 12, "global_batch_size": 128},
        "data_parallel_divides_batch: a rollout of 256 samples does not divide by dp=96; nearest that work: "
        "--rollout-batch-size 36 or 24 without --global-batch-size",
    ),
    (
        {"gpus_per_node": 6, "global_batch_size": 100},
        "global_batch_divides_samples: --global-batch-size 100 does not divide the 256 samples of a rollout (32 "
        "prompts x 8); nearest that work: --rollout-batch-size 33 or 30 without --global-batch-size",
    ),
    (
        {PP: 37, "gpus_per_node": 37},
        "no layout of this cluster works with these lengths and batches: change them, or use other machines",
    ),
    (
        {"recompute_granularity": "none"},
        "trainer_batch_fits: the trainer takes ",
    ),
    (
        {"recompute_granularity": "none", "max_tokens_per_gpu": 20000},
        "; lower --max-tokens-per-gpu 20000, raise tensor- or pipeline-parallel size, or give --recompute-granularity",
    ),
    (
        {"max_tokens_per_gpu": 1 << 20},
        "; lower --max-tokens-per-gpu 1048576, raise tensor- or pipeline-parallel size",
    ),
    (
        {"global_batch_size": 4},
        "data_parallel_divides_batch: --global-batch-size 4 does not divide by dp=8; nearest that work: 8, 16, 32",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN)
def test_each_rule_names_itself_the_numbers_and_what_works(fields: dict[str, Any], message: str) -> None:
    found = refusal(**fields)
    assert found.startswith("layout rule ") and "\n" not in found
    assert message in found


def test_every_rule_of_a_launch_can_fail() -> None:
    """The contract's own layout rules fail in `tests/contract/test_layout.py`, vocabulary and sizes among them."""
    seen = {refusal(**fields).split()[2].rstrip(":") for fields, _ in BROKEN}
    assert {rule.name for rule in OWN} - seen == set()


SIZE = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Launches on up to 64 GPUs, most of them close to working."""
    nodes = draw(st.sampled_from([1, 2, 4, 8]))
    gpus = draw(st.sampled_from([1, 2, 4, 6, 8]))
    colocate = draw(st.booleans())
    dp_prompts = draw(st.sampled_from([1, 8, 24, 64]))
    fields: dict[str, Any] = {
        "model": draw(st.sampled_from(["Qwen3-0.6B", "Qwen3-4B", "Qwen3-14B", "Qwen3-32B"])),
        "nodes": nodes,
        "gpus_per_node": gpus,
        "colocate": colocate,
        TP: draw(SIZE),
        PP: draw(SIZE),
        CP: draw(SIZE),
        ENGINE: draw(SIZE),
        "rollout_batch_size": dp_prompts,
        "rollout_max_context_len": draw(st.sampled_from([4096, 8192, 10002])),
    }
    if not colocate:
        fields["rollout_num_gpus"] = draw(st.integers(1, nodes * gpus))
    return fields


def engines_agree(plan: Plan) -> None:
    """What Megatron 0.19.2, SGLang 0.5.17 and Miles assert of sizes, written from their sources."""
    shape, cluster, batch = plan.model.shape, plan.cluster, plan.batch
    train, engine = plan.layout.train, plan.layout.rollout.tp
    # megatron.training.arguments.validate_args, parallel_state.initialize_model_parallel
    assert cluster.train_gpus % (train.tp * train.pp * train.cp) == 0
    assert cluster.train_gpus == train.tp * train.pp * train.cp * train.dp
    assert batch.global_batch_size % train.dp == 0
    assert train.cp == 1 or batch.max_context_len % (2 * train.cp) == 0
    assert shape.max_position_embeddings >= batch.max_context_len
    # TransformerConfig, tensor_parallel.layers, the equal split of layers
    assert shape.num_attention_heads % train.tp == 0
    assert shape.num_key_value_heads % train.tp == 0
    assert shape.intermediate_size % train.tp == 0
    assert shape.num_hidden_layers % train.pp == 0
    divisor = shape.vocab_pad_multiple // train.tp
    assert divisor * train.tp == shape.vocab_pad_multiple
    assert -(-shape.vocab_size // (divisor * train.tp)) * divisor * train.tp == shape.padded_vocab_size
    assert shape.padded_vocab_size % train.tp == 0
    # all-to-all context parallelism
    assert (shape.num_key_value_heads // train.tp) % train.cp == 0
    # sglang: heads over ranks, one node an engine, vocabulary padded to 64
    assert shape.num_attention_heads % engine == 0
    assert shape.num_key_value_heads % engine == 0
    assert engine <= cluster.gpus_per_node
    assert shape.padded_vocab_size % engine == 0
    # Miles: placement groups, engines, hand-over of weights in groups of an engine's size
    assert cluster.actor_nodes * cluster.actor_gpus_per_node == cluster.train_gpus
    assert cluster.actor_gpus_per_node <= cluster.gpus_per_node
    assert cluster.rollout_gpus % engine == 0
    assert cluster.engines * engine == cluster.rollout_gpus
    if cluster.colocate:
        assert cluster.train_gpus == cluster.rollout_gpus == cluster.gpus
        assert cluster.train_gpus % engine == 0
    else:
        assert cluster.train_gpus + cluster.rollout_gpus == cluster.gpus
    # no engine's GPUs lie on two machines, counted as Miles orders them
    first = 0 if cluster.colocate else cluster.train_gpus
    for number in range(cluster.engines):
        gpus = range(first + number * engine, first + (number + 1) * engine)
        assert len({gpu // cluster.gpus_per_node for gpu in gpus}) == 1
    assert batch.samples % batch.global_batch_size == 0


@settings(max_examples=120, deadline=None)
@given(requests())
def test_what_passes_satisfies_the_engines_own_checks_and_what_does_not_names_its_rule(fields: dict[str, Any]) -> None:
    try:
        plan = make_plan(LaunchRequest.model_validate(fields))
    except Refusal as refused:
        match = re.match(r"layout rule (\w+): ", str(refused))
        assert match is not None and match[1] in NAMES
        return
    engines_agree(plan)


def test_every_layout_of_64_gpus_that_passes_satisfies_the_engines() -> None:
    """All sizes there are, and not a drawn few, on 8 machines of 8: ten pairs of TP and CP, three PPs, four engines."""
    passed = 0
    for tp in range(1, 9):
        for pp in (1, 2, 3, 4, 6, 8, 9, 12):
            for cp in range(1, 9):
                for engine in (1, 2, 3, 4, 8):
                    fields = {TP: tp, PP: pp, CP: cp, ENGINE: engine, "nodes": 8, "rollout_batch_size": 64}
                    if broken_rule(facts(**fields)) is None:
                        passed += 1
                        engines_agree(make_plan(request(**fields)))
    assert passed == 10 * 3 * 4


WILD = st.integers(-(2**70), 2**70) | st.integers(-3, 70) | st.none() | st.booleans() | st.text(max_size=3)
ANY = WILD | st.floats() | st.sampled_from(["full", "cpu", "contiguous", "Qwen3-4B", "/dev/null"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(LaunchRequest.model_fields)), ANY, max_size=6))
def test_wild_values_are_planned_or_refused_in_one_line(fields: dict[str, Any]) -> None:
    try:
        plan = make_plan(make_request({"model": "Qwen3-8B", **fields}))
    except Refusal as refused:
        line = str(refused).replace(str(fields.get("model")), "")
        plan = None
    if plan is None:
        assert line and "\n" not in line
        return
    engines_agree(plan)
    for write in FORMATS.values():
        assert write(plan)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_what_a_refusal_offers_works_on_the_same_cluster(fields: dict[str, Any]) -> None:
    known = recognise(fields["model"])
    asked = LaunchFacts(LaunchRequest.model_validate(fields), known.shape, known.contract)
    broken = broken_rule(asked)
    if broken is None or broken[0] not in MENDED:
        return
    offered = nearest_requests(asked)
    with pytest.raises(LayoutRefused) as error:
        check_launch(asked)
    assert ("nearest that work" in str(error.value)) == bool(offered) and len(offered) <= 3
    for one in offered:
        assert all(getattr(one, name) == fields[name] for name in ("nodes", "gpus_per_node", "colocate"))
        assert broken_rule(asked._replace(request=one)) is None


def test_the_page_holds_every_rule_as_the_code_says_it() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE))
    expected = {rule.name: f"{rule.says} | {rule.reason}" for rule in (*LAYOUT_RULES, *OWN)}
    expected[LENGTH_RULE] = f"{LENGTH_SAYS} | {LENGTH_REASON}"
    assert rows == expected
