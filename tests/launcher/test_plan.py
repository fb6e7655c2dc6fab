"""A plan holds exactly what the flags and the model say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from miles_top_launcher.matrix import matrix_layouts, train_name
from miles_top_launcher.plan import make_plan
from miles_top_launcher.problems import BadInput
from miles_top_launcher.prompts import draw_prompts
from miles_top_launcher.rollout import engine_settings, sample_command
from tests.launcher.examples import request, write_lines


def test_defaults_are_one_process_a_side_and_2000_tokens(tmp_path: Path) -> None:
    plan = make_plan(request(), tmp_path)
    assert [layout.rollout.tp for layout in plan.layouts] == [1]
    assert [layout.train.world_size for layout in plan.layouts] == [1]
    assert plan.contract.name == "qwen3_dense_true_on_policy_v1"
    assert len(plan.prompts) * plan.max_new_tokens >= 2000
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 1  # type: ignore[misc]


def test_a_run_of_a_published_name_says_how_to_get_its_weights(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match="a run needs its weights: hf download Qwen/Qwen3-4B-Thinking-2507 --local-dir DIR"
    ):
        make_plan(request(model="qwen3-4b-thinking-2507"), tmp_path)


def test_drawn_prompts_have_the_length_that_is_asked_for(tmp_path: Path) -> None:
    plan = make_plan(request(num_prompts=50, prompt_tokens=80), tmp_path)
    lengths = [len(prompt) for prompt in plan.prompts]
    assert (len(lengths), min(lengths), max(lengths)) == (50, 70, 90)


def test_the_controls_take_every_prompt_on_a_cpu_and_a_few_on_a_gpu(tmp_path: Path) -> None:
    plan = make_plan(request(), tmp_path)
    assert plan.control_count == len(plan.prompts)
    assert dataclasses.replace(plan, device="cuda").control_count == 8


def test_a_gpu_decodes_from_graphs_and_packs_more(tmp_path: Path) -> None:
    plan = make_plan(request(), tmp_path)
    settings = engine_settings(plan, plan.models[0], 1)
    assert settings["disable_cuda_graph"] is True
    on_gpu = dataclasses.replace(plan, device="cuda")
    settings = engine_settings(on_gpu, on_gpu.models[0], 1)
    assert "disable_cuda_graph" not in settings
    assert (settings["cuda_graph_max_bs_decode"], settings["disable_prefill_cuda_graph"]) == (34, True)
    assert settings["attention_backend"] == "fa3"


def test_the_small_matrix_is_the_18_layouts_of_two_rollout_tps() -> None:
    layouts = matrix_layouts("small", "zigzag")
    train = ["TP1", "TP2", "TP4", "PP2", "CP2", "DP2", "TP2xPP2", "TP2xCP2", "PP2xCP2"]
    expected = [(tp, name) for tp in (1, 2) for name in train]
    assert [(layout.rollout.tp, train_name(layout.train)) for layout in layouts] == expected
    assert len(set(layouts)) == 18


def test_two_gpus_hold_ten_layouts() -> None:
    layouts = matrix_layouts("two", "zigzag")
    assert {layout.rollout.tp for layout in layouts} == {1, 2}
    assert [train_name(layout.train) for layout in layouts[:5]] == ["TP1", "TP2", "PP2", "CP2", "DP2"]
    assert len(layouts) == 10 and set(layouts) <= set(matrix_layouts("small", "zigzag"))


def test_the_full_matrix_adds_models_and_rollout_tp_4(tmp_path: Path) -> None:
    plan = make_plan(request(matrix="full"), tmp_path)
    assert plan.rollout_tps == (1, 2, 4)
    assert len(plan.layouts) == 27
    assert [model.name for model in plan.models] == [
        "tiny-tied-trained",
        "tiny-tied-initial",
        "tiny-untied-trained",
        "tiny-untied-initial",
    ]
    assert plan.trainer_ranks == 4


def test_the_cut_of_context_parallel_input_reaches_the_layout(tmp_path: Path) -> None:
    plan = make_plan(request(cp=2, cp_layout="contiguous"), tmp_path)
    assert plan.layouts[0].train.cp_layout == "contiguous"


def test_prompts_of_a_file_keep_their_order_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = write_lines(tmp_path, '{"input_ids": [5, 6]}', "", '{"input_ids": [7], "note": "kept out"}')
    assert make_plan(request(prompts=path), tmp_path).prompts == ((5, 6), (7,))
    assert make_plan(request(prompts=path, num_prompts=1), tmp_path).prompts == ((5, 6),)


def test_text_and_chats_are_tokenized_by_the_model_folders_own_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from miles_top_launcher.random_model import RandomModel, build

    folder = build(RandomModel(), tmp_path / "model")
    backend = Tokenizer(models.WordLevel({"hello": 3, "world": 4, "user": 5, "?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.role }} {{ turn.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    path = write_lines(
        tmp_path,
        '{"prompt": "hello world"}',
        '{"messages": [{"role": "user", "content": "world"}]}',
        '{"input_ids": [9]}',
    )
    assert make_plan(request(model=str(folder), prompts=path), tmp_path).prompts == ((3, 4), (5, 4), (9,))
    for line in (
        r'{"prompt": "hello \ud800"}',
        r'{"messages": [{"role": "user", "content": "\ud800"}]}',
    ):
        wrong = write_lines(tmp_path, line)
        with pytest.raises(BadInput, match=r":1: character \d is \\ud800, half of a surrogate pair"):
            make_plan(request(model=str(folder), prompts=wrong), tmp_path)


def test_drawn_prompts_depend_on_the_seed_only() -> None:
    assert draw_prompts(5, 1003, 1) == draw_prompts(5, 1003, 1)
    assert draw_prompts(5, 1003, 1) != draw_prompts(5, 1003, 2)
    drawn = draw_prompts(50, 7, 3)
    assert len(drawn[0]) == 1
    assert all(prompt and all(0 <= token < 7 for token in prompt) for prompt in drawn)


def test_every_request_has_its_own_seed_and_greedy_is_scored_at_one(tmp_path: Path) -> None:
    plan = make_plan(request(num_prompts=3, seed=10, temperature=0.0), tmp_path)
    params = sample_command(plan)["sampling_params"]
    assert [one["sampling_seed"] for one in params] == [10, 11, 12]
    assert {one["temperature"] for one in params} == {0.0}
    assert plan.scoring_temperature == 1.0
    assert make_plan(request(temperature=0.7), tmp_path).scoring_temperature == 0.7


def test_engine_settings_name_the_contract_and_what_it_sets(tmp_path: Path) -> None:
    plan = make_plan(request(dtype="float32"), tmp_path)
    settings = engine_settings(plan, plan.models[0], 2)
    assert settings["true_on_policy_contract"] == plan.contract.name
    assert settings["tp_size"] == 2
    assert settings["dtype"] == "float32"
    assert settings["enable_deterministic_inference"] is True
