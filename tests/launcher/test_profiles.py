"""Profiles: every published dense Qwen3 is recognised with its own sizes; what is not covered is refused, with why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher._contract.schema.errors import Refusal, UnsupportedModel
from miles_top_launcher._contract.schema.layout import Layout, RolloutLayout, TrainLayout
from miles_top_launcher._contract.schema.layout_rules import LayoutFacts, broken_rules
from miles_top_launcher._contract.schema.profile import check_kernel_set
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher.launch.memory import parameters
from miles_top_launcher.launch.plan import RAN_AS, make_plan, recommended
from miles_top_launcher.launch.request import LaunchRequest
from miles_top_launcher.problems import BadInput
from miles_top_launcher.profiles.profile import FamilyProfile, Model, Ran
from miles_top_launcher.profiles.recognise import recognise
from miles_top_launcher.profiles.registry import profiles
from miles_top_launcher.random_model import RANDOM_MODELS

ROOT = Path(__file__).resolve().parents[2]
FAMILY = next(family for family in profiles() if family.family == "qwen3_dense")
MODELS = {model.name: model for model in FAMILY.models}
CONTRACT = load_contract(FAMILY.contract)

# What the model cards say, in billions: all parameters, those without embeddings.
PUBLISHED = {
    "Qwen3-0.6B": (0.6, 0.44),
    "Qwen3-1.7B": (1.7, 1.4),
    "Qwen3-4B": (4.0, 3.6),
    "Qwen3-8B": (8.2, 6.95),
    "Qwen3-14B": (14.8, 13.2),
    "Qwen3-32B": (32.8, 31.2),
}


def size_of(model: Model) -> str:
    return "-".join(model.name.split("-")[:2])


def write_config(folder: Path, model: Model, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {**FAMILY.config_of(model), "transformers_version": "4.51.0", "use_cache": True, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_every_published_name_is_there() -> None:
    names = {name for model in FAMILY.models for name in model.hub_names}
    sizes = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
    expected = {f"Qwen/Qwen3-{size}" for size in sizes}
    expected |= {f"Qwen/Qwen3-{size}-Base" for size in sizes if size != "32B"}
    assert names == expected | {"Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Thinking-2507"}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_give_the_published_number_of_parameters(name: str) -> None:
    model = MODELS[name]
    total, inner = parameters(FAMILY.shape_of(model, CONTRACT))
    said, said_inner = PUBLISHED[size_of(model)]
    assert total == model.parameters
    assert round(total / 1e9, 1) == said
    assert round(inner / 1e9, 2 if said_inner in (0.44, 6.95) else 1) == said_inner


@pytest.mark.parametrize("name", MODELS)
def test_both_kernel_sets_take_every_size_at_every_tp(name: str) -> None:
    shape = FAMILY.shape_of(MODELS[name], CONTRACT)
    for kernel_set in CONTRACT.kernel_policy.kernel_sets:
        check_kernel_set(shape, CONTRACT, kernel_set)

    def works(layout: Layout) -> bool:
        return next(broken_rules(LayoutFacts(layout, shape, CONTRACT)), None) is None

    sizes = range(1, 17)
    assert [tp for tp in sizes if works(Layout(rollout=RolloutLayout(tp=tp)))] == [1, 2, 4, 8]
    pairs = [(tp, cp) for tp in sizes for cp in sizes if works(Layout(train=TrainLayout(tp=tp, cp=cp)))]
    assert pairs == [(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8]


def test_positions_and_rotary_base_tell_the_releases_apart() -> None:
    found = {
        name: (shape.max_position_embeddings, shape.rope_theta)
        for name, shape in ((name, FAMILY.shape_of(model, CONTRACT)) for name, model in MODELS.items())
    }
    for name, constants in found.items():
        expected = (262144, 5e6) if "2507" in name else (32768, 1e6) if "Base" in name else (40960, 1e6)
        assert constants == expected, name


@pytest.mark.parametrize(
    "given", ["Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b-thinking-2507", "QWEN/qwen3-4B-THINKING-2507"]
)
def test_a_name_is_known_with_and_without_its_owner_in_any_case(given: str) -> None:
    known = recognise(given)
    assert known.hub_names == ("Qwen/Qwen3-4B-Thinking-2507",)
    assert known.model is MODELS["Qwen3-4B-2507"] or known.model == MODELS["Qwen3-4B-2507"]


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_known_by_its_config_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    known = recognise(str(write_config(tmp_path / "checkpoint-100", MODELS[name])))
    assert known.model == MODELS[name]
    assert known.folder == tmp_path / "checkpoint-100"


def test_transformers_5_writes_the_rotary_base_elsewhere(tmp_path: Path) -> None:
    model = MODELS["Qwen3-8B"]
    block = {"rope_type": "default", "rope_theta": 1000000}
    folder = write_config(tmp_path / "m", model, rope_theta=None, rope_parameters=block)
    assert recognise(str(folder)).model == model


def test_an_unknown_size_of_the_architecture_is_planned_and_said_to_be_unknown(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "mine", MODELS["Qwen3-4B"], num_hidden_layers=20)
    plan = make_plan(LaunchRequest(model=str(folder)))
    assert plan.model.hub_names == () and plan.model.family is None
    assert plan.notes[0] == "no published model of a profile has these sizes: planned by the rules alone"
    assert plan.evidence.status == "not run"
    with pytest.raises(BadInput, match=r"--recommended: .* has the sizes of no published model"):
        recommended(str(folder), None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Qwen/Qwen3-30B-A3B", "mixture of experts"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "mixture of experts"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "mixture of experts"),
        ("Qwen/Qwen3-4B-FP8", "quantised"),
        ("Qwen/Qwen3-32B-AWQ", "quantised"),
        ("Qwen/Qwen3-8B-GGUF", "quantised"),
        ("Qwen/Qwen3-4B-MLX-4bit", "quantised"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "quantised"),
        ("Qwen/Qwen3-VL-8B-Instruct", "images"),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "images"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "linear attention"),
        ("Qwen/Qwen3.5-4B", "linear attention"),
        ("Qwen/Qwen3-Embedding-0.6B", "vectors or scores"),
        ("Qwen/Qwen3-Reranker-8B", "vectors or scores"),
    ],
)
def test_neighbours_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        recognise(name)
    assert str(error.value).startswith(f"--model {name}: refused: ")
    assert reason in str(error.value) and "; use " in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "mixture of experts"),
        ({"architectures": ["OtherForCausalLM"]}, "'OtherForCausalLM' has no contract; covered: Qwen3ForCausalLM"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_a_folder_is_refused_by_its_config(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = write_config(tmp_path / "m", MODELS["Qwen3-8B"], **changes)
    with pytest.raises(Refusal) as error:
        recognise(str(folder))
    assert reason in str(error.value)


def test_an_embedding_models_folder_is_refused_by_its_files(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", MODELS["Qwen3-0.6B-Base"])
    (folder / "modules.json").write_text("[]")
    with pytest.raises(UnsupportedModel, match=r"its modules\.json makes it .* vectors or scores"):
        recognise(str(folder))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "--model is empty"),
        ("/nowhere/Qwen3-4B", "no such folder"),
        ("a/b/c", "no such folder"),
        ("Qwen/Qwen3-7B", "no profile has that name; known: Qwen/Qwen3-0.6B, "),
        ("Qwen3-4B-Instruct", "did you mean Qwen/Qwen3-4B-Instruct-2507?"),
        ("meta-llama/Llama-3.1-8B", "or give a Hugging Face folder, of which config.json is enough"),
        ("~nobody-here/Qwen3-4B", "no such folder"),
    ],
)
def test_what_is_neither_name_nor_folder_is_one_line(given: str, message: str) -> None:
    with pytest.raises(BadInput) as error:
        recognise(given)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_recommended_works_and_says_whether_it_ran(name: str) -> None:
    model = MODELS[name]
    plan = make_plan(LaunchRequest.model_validate({"model": model.hub_names[0], **model.recommended.launch}))
    assert plan.evidence.status == ("ran" if name in ("Qwen3-0.6B", "Qwen3-4B") else "not run")
    if plan.evidence.status == "ran":
        assert [Path(record).name.split("-")[3] for record in plan.evidence.records] == ["cell", "steps"]


def test_records_speak_of_no_other_temperature() -> None:
    launch = {"model": "Qwen/Qwen3-4B", **recommended("Qwen/Qwen3-4B", None)}
    assert make_plan(LaunchRequest.model_validate(launch)).evidence.status == "ran"
    other = make_plan(LaunchRequest.model_validate({**launch, "rollout_temperature": 0.7})).evidence
    assert (other.status, other.records) == ("not run", ()) and "temperature 1 only" in other.note


def test_what_miles_needs_is_said_where_there_is_a_plan_for_it() -> None:
    assert "stand-ins of docs/hosts.md" in make_plan(LaunchRequest(model="Qwen3-4B")).notes[-1]
    assert make_plan(LaunchRequest(model="Qwen3-0.6B", kernel_set="cpu", gpus_per_node=1)).notes == ()


RAN = [(model, ran) for model in FAMILY.models for ran in model.ran]


@pytest.mark.parametrize(("model", "ran"), RAN, ids=[f"{model.name}-{number}" for number, (model, _) in enumerate(RAN)])
def test_evidence_is_of_this_shape_and_layout_and_exact(model: Model, ran: Ran) -> None:
    shape = FAMILY.shape_of(model, CONTRACT).model_dump()
    for record in ran.records:
        found = json.loads((ROOT / record).read_text(encoding="utf-8"))
        assert found["run"]["kernel_set"] == "hopper"
        asked = found["run"]["sizes"]
        assert f"about {asked['prompt_tokens']} tokens, {asked['new_tokens']} new" in RAN_AS
        assert len(found["run"]["device"]) == 2 and all("H200" in one for one in found["run"]["device"])
        assert len(found["run"]["device"]) >= max(ran.rollout_tp, ran.tp * ran.pp * ran.cp * ran.dp)
        sizes = {**found["result"]["layout"]["train"], "rollout_tp": found["result"]["layout"]["rollout"]["tp"]}
        assert {name: sizes[name] for name in ("rollout_tp", "tp", "pp", "cp", "dp")} == ran.model_dump(
            exclude={"records"}
        )
        compared = found["result"].get("after", [found["result"]])
        assert compared and all(one["token_count"] > 0 and one["mismatch_count"] == 0 for one in compared)
        random = next(name for name in RANDOM_MODELS if Path(record).name.startswith(f"{name}-"))
        config = RANDOM_MODELS[random].config()
        assert {field: value for field, value in shape.items() if field in config} == {
            field: config[field] for field in shape if field in config
        }


def test_every_record_of_a_layout_is_in_a_profile() -> None:
    named = {record for _, ran in RAN for record in ran.records}
    folder = ROOT / "docs" / "evidence" / "h200x2"
    records = {str(path.relative_to(ROOT)) for kind in ("cell", "steps") for path in folder.glob(f"*-{kind}-*.json")}
    assert named == records and len(RAN) == 20


def test_another_layout_or_machine_has_no_evidence() -> None:
    def records(**changes: Any) -> tuple[str, ...]:
        launch = {"model": "Qwen3-4B", "gpus_per_node": 2, "tensor_model_parallel_size": 2, **changes}
        return make_plan(LaunchRequest.model_validate(launch)).evidence.records

    assert len(records()) == 2
    assert len(records(rollout_num_gpus_per_engine=2)) == 1
    assert records(gpus_per_node=4) == records(nodes=2) == records(kernel_set="cpu") == ()
    assert records(model="Qwen3-4B-Base") == records(model="Qwen3-8B") == ()


class Installer:
    """Puts a distribution with an entry point on the path, as pip would."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "other_family", raising=False)

    def install(self, name: str, source: str) -> None:
        (self.folder / "other_family.py").write_text(source)
        info = self.folder / "other_family-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-family\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[true_on_policy.profiles]\n{name} = other_family:data\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    return Installer(tmp_path, monkeypatch)


def other_profile() -> bytes:
    """A family of one model, larger than any Qwen3."""
    model = MODELS["Qwen3-32B"]
    data = {
        "family": "other",
        "contract": FAMILY.contract,
        "config": FAMILY.config,
        "models": [
            {
                "name": "Other-64B",
                "hub_names": ["Else/Other-64B"],
                "config": {**model.config, "num_hidden_layers": 128},
                "parameters": 1,
                "recommended": {"launch": {"gpus_per_node": 8, "tensor_model_parallel_size": 8}},
            }
        ],
    }
    return json.dumps(data, default=list).encode()


@pytest.mark.parametrize("form", ["data = {!r}", "data = {!r}.decode()", "def data():\n    return {!r}"])
def test_another_package_adds_a_family(packages: Installer, form: str) -> None:
    packages.install("other", form.format(other_profile()))
    assert [family.family for family in profiles()] == ["qwen3_dense", "other"]
    known = recognise("else/other-64b")
    assert known.family is not None and known.family.family == "other"
    assert known.shape.num_hidden_layers == 128
    assert recommended("Other-64B", None)["tensor_model_parallel_size"] == 8


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("qwen3_dense", "data = b'{}'", "profile 'qwen3_dense' is claimed twice"),
        ("other", "data = 3", "yields int; it must yield JSON"),
        ("other", "data = b'{}'", "not a valid profile: family: Field required"),
        ("other", "raise RuntimeError('no')", "could not be loaded: RuntimeError: no"),
        ("other", "import sys\nsys.exit()", "could not be loaded: SystemExit"),
        ("wrong", f"data = {other_profile()!r}", "holds family 'other'; the name must be 'wrong'"),
    ],
)
def test_a_broken_profile_stops_everything(packages: Installer, name: str, source: str, message: str) -> None:
    packages.install(name, source)
    with pytest.raises(UnsupportedModel) as error:
        recognise("Qwen/Qwen3-4B")
    assert message in str(error.value)


def test_one_name_stands_for_one_model() -> None:
    data = json.loads(other_profile())
    data["models"].append({**data["models"][0], "name": "Another"})
    with pytest.raises(UnsupportedModel, match="name 'else/other-64b' stands for two models"):
        FamilyProfile.from_json(json.dumps(data), "test")
