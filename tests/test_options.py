"""Refuse or obey: every option has a test that sees its effect, or one that sees its refusal. No row, no option."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import afterglow
from afterglow.api.base import TextModel
from afterglow.api.conversation import Conversation
from afterglow.chat.constraints.grammar import RESPONSE_FORMAT_FIELDS
from afterglow.cli.chat import chat
from afterglow.cli.settings import Settings
from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.llama.sampling import Sampling
from afterglow.media.policy import MediaPolicy
from afterglow.server.settings import ServerSettings

TESTS = Path(__file__).parent
C15 = "test_c15_each_option_has_the_effect_it_is_named_for"

CHAT = {
    "messages": "test_a_conversation_is_answered_and_the_second_turn_is_mostly_cached",
    "stream": "test_stream_and_whole_are_the_same",
    "n": "test_several_answers_share_one_prompt",
    "cancel": "test_a_chat_can_be_cancelled",
    "options": "test_an_option_that_does_not_exist_is_refused",
}
PLAN = {
    "messages": "test_a_text_is_a_question",
    "tools": "test_a_function_is_a_tool",
    "tool_choice": "test_required_is_a_call_of_one_of_the_tools",
    "parallel_tool_calls": "test_several_calls_come_where_they_may",
    "response_format": "test_a_format_lets_exactly_its_texts_through",
    "reasoning": "test_a_thought_is_closed_after_its_budget_and_the_answer_follows",
    "arguments": "test_arguments_reach_the_template",
}
REQUEST = {
    "prompt": "test_a_completion_is_the_one_known_by_construction",
    "max_tokens": "test_max_tokens_ends_an_answer",
    "temperature": "test_c14_a_seed_repeats_an_answer_and_its_absence_does_not",
    "seed": "test_c14_a_seed_repeats_an_answer_and_its_absence_does_not",
    "sampling": "test_sampling_reaches_the_answer",
    "stop": "test_stops_end_an_answer_and_are_named",
    "logprobs": "test_logprobs_come_with_the_tokens",
    "sequence": "test_c14_an_explicit_sequence_is_used",
    "boundaries": "test_boundaries_priority_and_ends_reach_the_engine",
    "priority": "test_boundaries_priority_and_ends_reach_the_engine",
    "deadline": "test_a_deadline_s_answer_is_what_there_is",
    "reuse": "test_reuse_can_be_refused",
    "ignore_ends": "test_boundaries_priority_and_ends_reach_the_engine",
    "salt": "test_what_is_on_disk_makes_the_next_start_warm",
}
COMPLETE = {
    "prompt": "test_a_completion_is_the_one_known_by_construction",
    "n": "test_c14_several_answers_share_one_prompt",
    "on_token": "test_c14_on_token_is_called_once_for_each_token",
    "cancel": "test_c14_a_cancel_flag_ends_the_work",
    "options": "test_an_option_that_does_not_exist_is_refused",
}
SAMPLING = {
    **{field.name: C15 for field in dataclasses.fields(Sampling)},
    "temperature": "test_c15_temperature_zero_is_argmax_even_where_the_margin_is_tiny",
    "dynamic_range": "test_c15_dynamic_temperature_sharpens_a_sure_row_more_than_a_flat_one",
    "dynamic_exponent": "test_c15_the_exponent_bends_the_dynamic_temperature",
    **dict.fromkeys(
        ("dry_base", "dry_last", "dry_breakers"),
        "test_c15_dry_grows_with_its_base_and_ends_at_its_reach_and_at_its_breakers",
    ),
    "dry_multiplier": "test_c15_dry_stops_a_phrase_from_being_said_again",
    "penalty_repeat": "test_c15_penalties_push_away_what_was_accepted",
    "grammar": "test_c15_a_grammar_lets_only_its_words_through",
    "seed": "test_c15_a_seed_decides_every_draw_and_none_means_random",
}
ENGINE_REQUEST = {
    "id": "test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on",
    "entries": "test_entries_are_one_row_of_tokens_that_exist_or_media",
    "contents": "test_c18_entries_and_contents_that_differ_are_typed_errors",
    "boundaries": "test_c4_the_ends_of_messages_are_always_cut",
    "system": "test_system_prompts_stay_where_the_engine_is_told_to_keep_them",
    "sampling": "test_a_seed_gives_the_same_tokens_cold_warm_and_in_company",
    "max_tokens": "test_max_tokens_and_stops_hold_inside_a_grammar",
    "stop": "test_a_stop_is_found_the_moment_its_last_byte_is_there",
    "stop_tokens": "test_stop_tokens_end_an_answer",
    "constraint": "test_every_answer_obeys_its_grammar",
    "thought": "test_a_thought_is_closed_when_its_budget_is_used_up",
    "ignore_ends": "test_a_thought_is_closed_when_its_budget_is_used_up",
    "logprobs": "test_logprobs_come_with_their_alternatives",
    "priority": "test_priority_goes_before_length",
    "deadline": "test_a_deadline_s_answer_is_what_there_is",
    "reuse": "test_reuse_can_be_refused",
    "sequence": "test_a_certain_slot_is_used_where_one_is_named",
    "salt": "test_another_salt_sees_nothing",
}
ENGINE = {
    "speculation": "test_off_is_off_and_a_drafter_that_is_not_there_is_refused",
    "drafters": "test_off_is_off_and_a_drafter_that_is_not_there_is_refused",
    "gap": "test_beside_generating_jobs_a_prompt_gets_what_the_gap_leaves",
    "deterministic": "test_five_ways_to_compute_a_prompt_give_the_same_tokens",
    "grid": "test_any_life_on_the_grid_gives_the_same_tokens_whatever_the_shapes",
    "parked_bytes": "test_parked_jobs_stay_within_their_bytes",
    "checkpoints": "test_checkpoints_stay_within_their_bytes_and_their_number",
    "ram_bytes": "test_the_budget_holds_and_changes_no_token",
    "disk_directory": "test_a_restart_is_warm",
    "pin_system": "test_system_prompts_stay_where_the_engine_is_told_to_keep_them",
    "disk_name": "test_a_directory_says_what_it_holds",
    "disk_bytes": "test_the_disk_has_a_limit",
    "segment": "test_a_common_beginning_is_on_disk_once",
    "picture_bytes": "test_encoded_pictures_stay_within_their_bytes",
}
CHECKPOINTS = {
    "max_checkpoints": "test_c4_zero_checkpoints_is_off",
    "every_n_tokens": "test_c4_the_cadence_cuts_every_n_tokens",
    "min_tokens": "test_c4_near_the_end_cuts_keep_the_minimum_length_and_gap",
    "min_gap": "test_c4_near_the_end_cuts_keep_the_minimum_length_and_gap",
    "max_bytes": "test_checkpoints_have_a_number_and_a_size",
}
CONSTRAINT = {
    "grammar": "test_every_answer_obeys_its_grammar",
    "after": "test_a_grammar_that_begins_after_a_text_leaves_everything_before_it_free",
    "once": "test_a_grammar_that_holds_once_ends_the_answer",
}
THOUGHT = {
    **dict.fromkeys(("tokens", "closes", "ending", "open"), "test_a_thought_is_closed_when_its_budget_is_used_up"),
    "opens": "test_a_thought_that_the_model_opens_is_counted_from_there",
}
LOAD = {
    "model": "test_it_knows_what_it_is",
    "context": "test_an_answer_stops_where_the_context_is_full",
    "sequences": "test_what_load_is_told_is_what_is_loaded",
    "gpu_layers": "test_c19_layers_go_to_the_gpu_as_far_as_they_fit",
    "threads": "test_what_load_is_told_is_what_is_loaded",
    "key_type": "test_c19_every_cache_type_computes",
    "value_type": "test_c19_every_cache_type_computes",
    "flash_attention": "test_c19_a_quantized_value_cache_needs_flash_attention",
    "unified": "test_what_load_is_told_is_what_is_loaded",
    "mmap": "test_c19_memory_mapping_and_locking_are_honoured",
    "mlock": "test_c19_memory_mapping_and_locking_are_honoured",
    "chat_template": "test_arguments_reach_the_template",
    "disk": "test_what_is_on_disk_makes_the_next_start_warm",
    "draft": "test_c14_heads_and_second_models_guess_where_they_are_asked_to",
    "projector": "test_c18_a_projector_is_loaded_where_it_is_named_or_lies_beside_the_model",
    "projecting": "test_what_load_is_told_about_the_projector_is_what_holds",
    "media": "test_what_load_is_told_about_media_is_what_holds",
    "strip_media": "test_c18_a_picture_for_a_model_that_cannot_see_is_left_out_where_that_is_wanted",
    "engine": "test_five_ways_to_compute_a_prompt_give_the_same_tokens",
    "state": "test_c12_the_way_up_and_down",
    "fetch": "test_an_example_runs",
    "progress": "test_c12_progress_is_reported_and_can_cancel",
    "hooks": "test_c12_a_hook_may_veto_a_load_and_learns_what_it_is_for",
}
MEDIA = {
    "allowed_hosts": "test_a_list_names_hosts_names_below_a_host_and_ports",
    "allow_private": "test_loopback_is_asked_only_where_private_numbers_are_allowed",
    "allowed_directory": "test_files_in_the_directory_are_read_however_they_are_named",
    "max_bytes": "test_no_more_than_the_limit_is_taken",
    "max_pixels": "test_limits_are_said_in_numbers",
    "max_side": "test_limits_are_said_in_numbers",
    "max_seconds": "test_a_long_sound_is_refused_by_its_header_and_by_what_comes",
    "max_decoded_bytes": "test_many_small_files_that_are_much_to_see_are_refused",
    "max_redirects": "test_redirects_end",
    "fetch_seconds": "test_a_slow_host_is_cut_off_by_the_time_for_all_of_it",
}
SERVER_MEDIA = {
    **dict.fromkeys(
        (
            *("media_hosts", "media_directory", "media_private", "media_seconds"),
            *("max_media_bytes", "max_pixels", "max_side", "max_sound_seconds", "max_decoded_bytes"),
        ),
        "test_the_settings_about_media_reach_the_models",
    ),
    "max_media": "test_a_request_has_only_so_many",
}
SETTINGS = {
    **{name: "test_the_commands_hand_every_setting_on" for name in Settings.model_fields},
    "model": "test_a_command_obeys_the_file",
    "max_tokens": "test_a_command_obeys_the_file",
    "stats": "test_the_statistics_can_be_hidden",
}
ASK = {
    "text": "test_a_conversation_is_answered_and_the_second_turn_is_mostly_cached",
    "images": "test_a_conversation_is_asked_about_pictures_and_remembers_them",
    "audio": "test_every_way_to_write_a_sound_is_the_same_sound",
    "options": "test_an_option_that_does_not_exist_is_refused",
}
FILES = {  # the flags that are no settings
    "image": "test_a_model_that_sees_answers_about_pictures_wherever_they_are_named",
    "audio": "test_a_model_that_hears_answers_about_sounds_wherever_they_are_named",
}
FORMATS = dict.fromkeys(RESPONSE_FORMAT_FIELDS, "test_a_format_lets_exactly_its_texts_through") | {
    "text": "test_text_is_everything"
}


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "command")]


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


TABLES = {
    "chat": (parameters(inspect.unwrap(TextModel.chat)), CHAT),
    "plan": (parameters(TextModel.plan_chat), PLAN),
    "request": (parameters(TextModel.build_request), REQUEST),
    "complete": (parameters(TextModel.complete), COMPLETE),
    "ask": (parameters(Conversation.ask), ASK),
    "afterglow chat": ([name for name in parameters(chat) if name not in Settings.model_fields], FILES),
    "load": (parameters(afterglow.load), LOAD),
    "MediaPolicy": (fields(MediaPolicy), MEDIA),
    "ServerSettings about media": (
        [name for name in ServerSettings.model_fields if name in SERVER_MEDIA or "media" in name],
        SERVER_MEDIA,
    ),
    "Sampling": (fields(Sampling), SAMPLING),
    "Request": (fields(Request), ENGINE_REQUEST),
    "EngineSettings": (fields(EngineSettings), ENGINE),
    "CheckpointSettings": (fields(CheckpointSettings), CHECKPOINTS),
    "Constraint": (fields(GrammarConstraint), CONSTRAINT),
    "ThoughtBudget": (fields(ReasoningBudget), THOUGHT),
    "Settings": (list(Settings.model_fields), SETTINGS),
    "response_format": (list(RESPONSE_FORMAT_FIELDS), FORMATS),
}


def written_tests() -> set[str]:
    trees = (ast.parse(path.read_text()) for path in TESTS.rglob("test_*.py"))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("table", TABLES)
def test_every_option_has_a_row_and_every_row_a_test(table: str) -> None:
    options, rows = TABLES[table]
    assert set(options) == set(rows)
    assert set(rows.values()) <= written_tests()


def test_an_option_that_does_not_exist_is_refused(smollm2: Path) -> None:
    with afterglow.load(smollm2, context=64) as model:
        for ask in (model.complete, model.chat, model.stream):
            with pytest.raises(TypeError, match="temprature"):
                ask("Hello", temprature=1)
