"""Which tests stand for which public report of speculative decoding going wrong, or why a report has none."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parents[1]


class Report(NamedTuple):
    """One fault, as it was reported."""

    names: tuple[str, ...]
    """Project and number of the report, and of others about the same fault that a test is named by."""
    tests: tuple[str, ...] = ()
    """File and function of every test that covers it."""
    absent: str = ""
    """Why there are none: the part it is about is not in this version."""


REPORTS = {
    1: Report(
        ("transformers_30042",),
        ("test_reports::test_transformers_30042", "test_drafts::test_transformers_30042_with_a_draft_model"),
    ),
    2: Report(
        ("mlxlm_1470",),
        (
            "test_reports::test_mlxlm_1470_exact_ties",
            "test_reports::test_mlxlm_1470_rounding_decides_near_ties_alone",
        ),
    ),
    3: Report(("transformers_28508",), ("test_verify::test_transformers_28508",)),
    4: Report(
        ("transformers_47932",),
        ("test_verify::test_transformers_47932", "test_drafts::test_transformers_47932_through_the_loop"),
    ),
    5: Report(("openvino_2331",), ("test_verify::test_openvino_2331", "test_reports::test_openvino_2331")),
    6: Report(
        ("eagle_183",),
        (
            "test_verify::test_eagle_183",
            "test_drafts::test_eagle_183_siblings_do_not_see_each_other",
            "test_drafts::test_eagle_183_through_the_loop",
        ),
    ),
    7: Report(
        ("vllm_42744",),
        (
            "test_sampling::test_vllm_42744",
            "test_decode::test_vllm_42744_a_banned_token_never_appears",
            "test_rules::test_vllm_42744_every_setting_holds_for_drafted_tokens",
        ),
    ),
    8: Report(
        ("vllm_6038",),
        (
            "test_draws::test_vllm_6038",
            "test_llm::test_vllm_6038_seeds_repeat_and_differ",
            "test_reports::test_vllm_6038_seeds_under_every_rule",
            "test_drafts::test_vllm_6038_a_mixed_batch_with_a_draft_model",
        ),
    ),
    9: Report(
        ("llamacpp_27972",),
        (
            "test_requests::test_llamacpp_27972_log_probs_of_drafted_tokens",
            "test_requests::test_llamacpp_27972_as_many_log_probs_as_tokens",
        ),
    ),
    10: Report(
        ("transformers_47912",),
        (
            "test_decode::test_transformers_47912_a_stop_inside_the_block",
            "test_requests::test_transformers_47912_two_ends_and_an_end_of_the_targets_own",
            "test_requests::test_transformers_47912_the_next_turn_reads_on_behind_the_end",
            "test_requests::test_transformers_47912_turns_through_the_library",
        ),
    ),
    11: Report(
        ("sglang_23802",),
        (
            "test_text::test_sglang_23802_stop_string_wherever_it_stands",
            "test_requests::test_sglang_23802_through_the_loop",
            "test_requests::test_sglang_23802_a_stop_string_in_a_rejected_draft_ends_nothing",
            "test_requests::test_sglang_23802_a_stop_string_inside_one_token",
        ),
    ),
    12: Report(
        ("transformers_46993",),
        (
            "test_decode::test_transformers_46993_exactly_as_many_tokens_as_asked",
            "test_requests::test_transformers_46993_usage_and_stream",
        ),
    ),
    13: Report(
        ("mlxlm_1591",),
        (
            "test_llm::test_mlxlm_1591_zero_tokens",
            "test_requests::test_mlxlm_1591_depths_of_none_one_and_more_than_there_is_to_say",
            "test_requests::test_mlxlm_1591_negative_limits_are_refused",
            "test_requests::test_mlxlm_1591_no_limit_runs_to_the_end_of_text_or_of_the_context",
            "test_requests::test_mlxlm_1591_without_an_end_id",
        ),
    ),
    14: Report(
        ("sglang_34740",),
        (
            "test_text::test_sglang_34740_whole_characters_in_every_split",
            "test_text::test_sglang_34740_a_bad_byte_does_not_stall",
            "test_requests::test_sglang_34740_through_the_loop",
            "test_requests::test_sglang_34740_a_bad_byte_in_a_stream",
        ),
    ),
    15: Report(("mlxlm_1914",), ("test_decode::test_mlxlm_1914_rollback_across_the_windows_edge",)),
    16: Report(
        ("mlxlm_846",),
        (
            "test_llm::test_mlxlm_846_recurrent_state_is_refused_before_the_first_token",
            "test_drafts::test_mlxlm_846_a_recurrent_draft_is_refused",
        ),
    ),
    17: Report(
        ("eagle_336",),
        (
            "test_draft_model::test_eagle_336_every_draft_of_a_twin_is_kept",
            "test_draft_model::test_eagle_336_a_spoilt_proposal_leaves_nothing_behind",
            "test_drafts::test_eagle_336_prompts_that_begin_alike",
            "test_drafts::test_eagle_336_turns_through_the_library",
        ),
    ),
    18: Report(
        ("vllm_13849",),
        (
            "test_draft_model::test_vllm_13849_a_smaller_draft_vocabulary",
            "test_draft_model::test_vllm_13849_a_larger_draft_vocabulary",
            "test_draft_model::test_vllm_13849_vocabularies_that_do_not_fit",
            "test_decode::test_vllm_13849_trees_that_do_not_fit_are_refused",
            "test_drafts::test_vllm_13849_a_padded_draft_in_the_library",
            "test_drafts::test_vllm_13849_other_words_are_translated_by_the_library",
        ),
    ),
    19: Report(
        ("transformers_46124",),
        ("test_translate::test_transformers_46124_letters_and_pairs_of_letters",),
    ),
    20: Report(
        ("llamacpp_27852", "transformers_28759"),
        (
            "test_ngram::test_llamacpp_27852_nothing_leaks_from_one_request_to_the_next",
            "test_drafts::test_llamacpp_27852_the_same_call_three_times",
            "test_drafts::test_llamacpp_27852_calls_of_the_library",
            "test_llm::test_transformers_28759_nothing_of_the_caller_is_changed",
            "test_drafts::test_transformers_28759_a_depth_reaches_the_draft",
        ),
    ),
    21: Report(("vllm_15348",), ("test_ngram::test_vllm_15348",)),
    22: Report(
        ("exllamav2_274",),
        (
            "test_decode::test_exllamav2_274_the_end_of_the_context",
            "test_draft_model::test_exllamav2_274_a_shorter_draft_context",
            "test_draft_model::test_exllamav2_274_a_twin_is_right_up_to_its_last_position",
            "test_requests::test_exllamav2_274_neither_model_reads_beyond_the_context",
            "test_requests::test_exllamav2_274_through_the_library",
        ),
    ),
    23: Report(
        ("sglang_11572",),
        (
            "test_stats::test_sglang_11572_four_drafted_and_4_0_2_accepted",
            "test_requests::test_sglang_11572_rates_are_pooled",
        ),
    ),
    24: Report(("sglang_27908",), absent="no method of this version reads a trained head"),
    25: Report(("specforge_139",), absent="no method of this version reads a trained head"),
    26: Report(("speco_67",), absent="no method of this version reads a trained head with a vocabulary of its own"),
    27: Report(("specforge_392",), absent="this version trains nothing"),
    28: Report(
        ("eagle_69",),
        (
            "test_sampling::test_eagle_69",
            "test_decode::test_eagle_69_bad_logits_end_the_request_where_they_are_reached",
            "test_draft_model::test_eagle_69_bad_logits_of_the_draft",
        ),
    ),
    29: Report(
        ("transformers_35099",),
        (
            "test_draft_model::test_transformers_35099_a_draft_of_another_dtype",
            "test_draft_model::test_transformers_35099_a_draft_on_another_device",
        ),
    ),
    30: Report(
        ("llamacpp_20",),
        (
            "test_rows::test_llamacpp_20_leaving_early",
            "test_llm::test_llamacpp_20_a_stream_closed_early",
            "test_draft_model::test_llamacpp_20_rows_are_freed_when_they_end",
            "test_batches::test_llamacpp_20_a_client_that_leaves",
            "test_batches::test_llamacpp_20_fifty_mixed_aborts",
        ),
    ),
    31: Report(("vllm_15506",), ("test_rows::test_vllm_15506_three_hundred_mixed_calls",)),
    32: Report(
        ("lmdeploy_4551",),
        (
            "test_rules::test_lmdeploy_4551_five_digits_and_the_end",
            "test_rules::test_lmdeploy_4551_the_law_is_the_masked_one",
            "test_rules::test_lmdeploy_4551_a_rule_switched_on_in_mid_block",
            "test_rules::test_lmdeploy_4551_a_rule_that_could_not_hold_is_refused",
            "test_rules::test_lmdeploy_4551_through_the_library",
        ),
    ),
    33: Report(("transformers_30611",), ("test_drafts::test_transformers_30611_encoder_decoders_are_refused",)),
    34: Report(
        ("lmdeploy_4671",),
        ("test_reports::test_lmdeploy_4671", "test_batches::test_lmdeploy_4671_rows_that_replace_each_other"),
    ),
    35: Report(
        ("vllm_16258",),
        (
            "test_ngram::test_vllm_16258_cost_does_not_grow_with_the_text",
            "test_stats::test_vllm_16258_useless_drafts_cost_no_extra_pass_and_show",
            "test_drafts::test_vllm_16258_passes_of_both_models",
            "test_drafts::test_vllm_16258_nothing_to_look_up_costs_nothing",
        ),
    ),
}


@cache
def functions() -> dict[str, set[str]]:
    """The test functions of every file, by its name without the ending."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        assert path.stem not in found, f"two files are called {path.name}"
        tree = ast.parse(path.read_text())
        found[path.stem] = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
    return found


def carries(function: str, name: str) -> bool:
    """Whether a test is named by a report: `test_llamacpp_20_x` is, by llamacpp_20, `test_llamacpp_20080` is not."""
    return re.match(rf"test_{name}(_|$)", function) is not None


def test_all_reports_are_here() -> None:
    assert list(REPORTS) == list(range(1, 36))
    names = [name for report in REPORTS.values() for name in report.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("number", REPORTS)
def test_a_report_has_tests_with_its_name_or_a_reason(number: int) -> None:
    report = REPORTS[number]
    assert bool(report.tests) != bool(report.absent)
    assert len(set(report.tests)) == len(report.tests)
    for test in report.tests:
        file, function = test.split("::")
        assert function in functions().get(file, ()), f"there is no {test}"
        assert any(carries(function, name) for name in report.names), f"{test} is named by another report"
    if report.tests:
        assert any(carries(test.split("::")[1], report.names[0]) for test in report.tests)
    for file, names in functions().items():
        for function in names:
            if any(carries(function, name) for name in report.names):
                assert not report.absent, f"{file}::{function} is about what is said to be absent"
