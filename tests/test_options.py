"""Every public option has a row here that names a test of its effect or of its rejection."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import afterglow
from afterglow.agents.conversation import Conversation
from afterglow.api.model import Model
from afterglow.api.options import ContextOptions, GenerationOptions, LoadOptions, PromptOptions, get_fields
from afterglow.chat.constraints.grammar import RESPONSE_FORMAT_FIELDS
from afterglow.cli.chat import chat
from afterglow.cli.settings import SETTINGS_FIELDS
from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.sampling import Sampling
from afterglow.media.policy import MediaPolicy
from afterglow.server.settings import ServerSettings
from afterglow.testing import models

TESTS = Path(__file__).parent
C15 = "test_c15_each_option_has_its_documented_effect"

CHAT = {
    "messages": "test_the_second_turn_of_a_conversation_is_a_prefix_hit",
    "tools": "test_a_function_can_be_a_tool",
    "stream": "test_stream_and_response_have_the_same_text",
    "n": "test_a_chat_can_have_several_responses",
    "on_token": "test_c14_on_token_is_called_once_for_each_token_of_a_chat",
    "cancel": "test_c14_a_cancel_event_ends_a_chat_and_its_stream",
    "options": "test_an_unknown_option_is_rejected_with_the_nearest_name",
}
PLAN = {
    "messages": "test_a_text_is_a_user_message",
    "tools": "test_a_function_can_be_a_tool",
    "tool_choice": "test_required_generates_a_call_of_one_of_the_tools",
    "parallel_tool_calls": "test_parallel_tool_calls_are_allowed",
    "response_format": "test_a_format_allows_exactly_its_texts",
    "reasoning": "test_reasoning_ends_at_its_budget_and_the_answer_follows",
    "chat_template": "test_a_request_can_have_a_chat_template_of_its_own",
    "chat_template_kwargs": "test_chat_template_kwargs_reach_the_template",
    "replay": "test_replay_can_be_turned_off_on_load_and_per_request",
}
REQUEST = {
    "prompt": "test_a_completion_is_the_expected_one",
    "max_tokens": "test_max_tokens_ends_a_response",
    "min_tokens": "test_boundaries_priority_and_ignore_eos_reach_the_engine",
    "temperature": "test_c14_a_seed_repeats_a_completion",
    **dict.fromkeys(
        ("top_k", "top_p", "min_p", "repeat_penalty"), "test_a_completion_stays_greedy_unless_an_option_asks_for_a_draw"
    ),
    "seed": "test_c14_a_seed_repeats_a_completion",
    "sampling": "test_sampling_changes_the_completion",
    "stop": "test_a_stop_string_ends_a_response_and_is_reported",
    "logprobs": "test_logprobs_come_with_the_tokens",
    "sequence": "test_c14_an_explicit_sequence_is_used",
    "boundaries": "test_boundaries_priority_and_ignore_eos_reach_the_engine",
    "priority": "test_boundaries_priority_and_ignore_eos_reach_the_engine",
    "deadline": "test_a_deadline_ends_generation_early",
    "use_prefix_cache": "test_a_request_can_bypass_the_prefix_cache",
    "ignore_eos": "test_boundaries_priority_and_ignore_eos_reach_the_engine",
    "overflow": "test_shift_keeps_the_bos_token_and_the_end_of_a_prompt",
    "lora": "test_each_request_chooses_its_adapters",
    "salt": "test_the_disk_cache_gives_prefix_hits_after_a_restart",
}
COMPLETE = {
    "prompt": "test_a_completion_is_the_expected_one",
    "n": "test_c14_several_choices_share_one_prefill",
    "on_token": "test_c14_on_token_is_called_once_for_each_token",
    "cancel": "test_c14_a_cancel_event_ends_the_request",
    "options": "test_an_unknown_option_is_rejected_with_the_nearest_name",
}
SAMPLING = {
    **{field.name: C15 for field in dataclasses.fields(Sampling)},
    "temperature": "test_c15_temperature_zero_is_argmax_even_if_the_margin_is_tiny",
    "dynatemp_range": "test_c15_dynamic_temperature_sharpens_a_low_entropy_row",
    "dynatemp_exponent": "test_c15_the_exponent_changes_the_dynamic_temperature",
    **dict.fromkeys(
        ("dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
        "test_c15_dry_grows_with_its_base_and_stops_at_its_range_and_breakers",
    ),
    "dry_multiplier": "test_c15_dry_prevents_a_repeated_phrase",
    "repeat_penalty": "test_c15_penalties_lower_accepted_tokens",
    "samplers": "test_c15_only_the_listed_samplers_apply_in_their_order",
    "grammar": "test_a_gbnf_grammar_of_the_sampling_parameters_is_enforced",
    "seed": "test_c15_a_seed_determines_every_draw_and_none_is_random",
}
ENGINE_REQUEST = {
    "id": "test_a_second_request_with_the_same_id_is_rejected_and_the_first_continues",
    "entries": "test_entries_must_be_valid_tokens_or_media",
    "media": "test_c18_media_that_does_not_match_the_entries_is_rejected",
    "boundaries": "test_c4_message_boundaries_are_always_checkpoint_positions",
    "retained": "test_a_pin_with_expiry_protects_its_prefix_until_it_expires",
    "system_length": "test_system_prompts_stay_cached_if_pin_system_prompts_is_set",
    "sampling": "test_a_seed_gives_the_same_tokens_cold_warm_and_concurrently",
    "max_tokens": "test_max_tokens_and_stops_apply_inside_a_grammar",
    "min_tokens": "test_a_completion_has_at_least_min_tokens",
    "stop": "test_a_stop_matches_as_soon_as_its_last_byte_arrives",
    "stop_tokens": "test_stop_tokens_end_a_completion",
    "logprob_tokens": "test_chosen_tokens_follow_the_alternatives",
    "constraint": "test_every_completion_matches_its_grammar",
    "reasoning_budget": "test_reasoning_is_closed_when_its_budget_is_used_up",
    "ignore_eos": "test_reasoning_is_closed_when_its_budget_is_used_up",
    "logprobs": "test_logprobs_come_with_their_alternatives",
    "priority": "test_priority_goes_before_length",
    "is_transient": "test_a_transient_sequence_is_evicted_before_others_and_stored_in_no_tier",
    "deadline": "test_a_deadline_ends_generation_early",
    "line_deadline": "test_after_the_line_deadline_the_next_line_end_ends_generation",
    "min_indent": "test_a_line_with_less_indentation_ends_generation",
    "use_prefix_cache": "test_a_request_can_bypass_the_prefix_cache",
    "sequence": "test_a_request_can_name_its_slot",
    "salt": "test_cached_state_is_invisible_to_other_salts",
    "adapters": "test_concurrent_requests_with_different_adapters_never_share_a_decode",
    "explained": "test_a_request_says_why_it_computed_tokens",
}
ENGINE = {
    "speculation": "test_speculation_off_drafts_nothing_and_a_missing_drafter_is_rejected",
    "drafters": "test_speculation_off_drafts_nothing_and_a_missing_drafter_is_rejected",
    "max_token_gap": "test_with_decoding_jobs_a_prefill_gets_what_the_token_gap_leaves",
    "deterministic": "test_a_prompt_gives_the_same_tokens_from_every_cache_state",
    "grid": "test_random_operations_in_deterministic_mode_give_the_cold_result",
    "swap_bytes": "test_swapped_out_sequences_stay_within_swap_bytes",
    "checkpoints": "test_checkpoints_stay_within_their_limits",
    "ram_cache_bytes": "test_the_ram_budget_is_never_exceeded_and_changes_no_token",
    "disk_cache_directory": "test_a_restarted_engine_reuses_prefixes_from_disk",
    "pin_system_prompts": "test_system_prompts_stay_cached_if_pin_system_prompts_is_set",
    "disk_cache_label": "test_the_models_of_a_directory_are_listed",
    "disk_cache_bytes": "test_the_disk_budget_is_never_exceeded",
    "block_size": "test_a_common_prefix_is_on_disk_once",
    "shared_cache": "test_an_engine_loads_what_another_one_computed",
    "shared_cache_key_file": "test_an_encrypted_store_shows_neither_entries_nor_cells",
    "write_through": "test_a_busy_replica_stores_an_answer_before_it_is_idle",
    "encoder_cache_bytes": "test_the_encoder_cache_stays_within_its_bytes",
}
CHECKPOINTS = {
    "max_checkpoints": "test_c4_zero_max_checkpoints_disables_checkpoints",
    "every_n_tokens": "test_c4_regular_positions_are_every_n_tokens",
    "min_tokens": "test_c4_tail_positions_respect_the_minimum_length_and_gap",
    "min_gap": "test_c4_tail_positions_respect_the_minimum_length_and_gap",
    "max_bytes": "test_checkpoints_stay_within_their_number_and_bytes",
}
CONSTRAINT = {
    "grammar": "test_every_completion_matches_its_grammar",
    "triggers": "test_a_triggered_grammar_does_not_constrain_tokens_before_its_trigger",
    "stop_after_first": "test_stop_after_first_ends_the_completion_with_the_grammar",
    "prefix": "test_a_continued_message_is_the_beginning_of_the_response_format",
    "stop_at_other_text": "test_other_text_after_a_complete_one_ends_the_completion_if_asked",
}
REASONING_BUDGET = {
    **dict.fromkeys(
        ("max_tokens", "end_marker", "closing_tokens", "starts_open"),
        "test_reasoning_is_closed_when_its_budget_is_used_up",
    ),
    "start_marker": "test_reasoning_that_the_model_opens_is_counted_from_its_start_marker",
}
LOAD = {
    "model": "test_smollm2_reports_its_info",
    "name": "test_a_model_can_have_another_name",
    "host": "test_a_method_has_the_same_result_on_both_hosts",
    "context": "test_a_completion_ends_if_the_context_is_full",
    "sequences": "test_c19_an_option_of_load_reaches_llama_cpp",
    "cpu_moe_layers": "test_c19_experts_that_stay_in_ram_do_not_change_the_logits",
    "gpu_layers": "test_c19_an_option_of_load_reaches_llama_cpp",
    "threads": "test_c19_an_option_of_load_reaches_llama_cpp",
    "cache_type_k": "test_c19_an_option_of_load_reaches_llama_cpp",
    "cache_type_v": "test_c19_an_option_of_load_reaches_llama_cpp",
    "flash_attention": "test_c19_an_option_of_load_reaches_llama_cpp",
    "kv_unified": "test_c19_an_option_of_load_reaches_llama_cpp",
    "mmap": "test_c19_an_option_of_load_reaches_llama_cpp",
    "mlock": "test_c19_an_option_of_load_reaches_llama_cpp",
    "pooling": "test_the_pooling_option_chooses_the_embedding",
    **dict.fromkeys(("batch", "ubatch", "swa_full"), "test_batch_sizes_and_the_full_window_are_those_of_the_context"),
    **dict.fromkeys(
        ("split_mode", "tensor_split", "main_gpu"),
        "test_every_option_of_the_weights_is_a_parameter_of_llama_cpp",
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor"),
        "test_rope_and_yarn_options_change_the_logits",
    ),
    **dict.fromkeys(("yarn_beta_fast", "yarn_beta_slow"), "test_rope_and_yarn_options_change_the_logits"),
    "chat_template": "test_chat_template_kwargs_reach_the_template",
    "disk_cache": "test_the_disk_cache_gives_prefix_hits_after_a_restart",
    "draft": "test_c14_mtp_heads_and_draft_models_draft_if_given",
    "projector": "test_c18_a_projector_is_loaded_by_name_or_from_the_directory_of_the_model",
    "projector_settings": "test_the_projector_settings_of_load_are_applied",
    "media_policy": "test_the_media_policy_of_load_is_applied",
    "replay": "test_replay_can_be_turned_off_on_load_and_per_request",
    "adapters": "test_each_request_chooses_its_adapters",
    "strip_media": "test_c18_unsupported_media_is_stripped_if_configured",
    "shorten_embeddings": "test_dimensions_need_a_model_that_was_trained_for_them",
    "replicas": "test_one_address_serves_several_engine_processes",
    **dict.fromkeys(("shared_cache", "shared_cache_key_file"), "test_the_store_of_load_is_a_tier_of_the_engine"),
    "reranker": "test_the_kind_of_a_reranker_follows_from_its_file_and_can_be_set",
    "sampling_defaults": "test_the_defaults_given_to_load_override_the_file",
    "engine": "test_a_prompt_gives_the_same_tokens_from_every_cache_state",
    "options": "test_a_misspelled_keyword_of_load_is_rejected_before_the_model_is_looked_up",
    **dict.fromkeys(
        (
            *("ram_cache_bytes", "disk_cache_bytes", "pin_system_prompts", "max_token_gap", "speculation"),
            "deterministic",
        ),
        "test_an_option_replaces_the_field_of_given_engine_settings",
    ),
    "state": "test_c12_the_load_states_go_up_and_down",
    "fetch": "test_the_code_of_a_page_runs",
    "progress": "test_c12_progress_is_reported_and_can_cancel",
    "hooks": "test_c12_a_hook_gets_the_target_state_and_can_reject_the_load",
}
MEDIA = {
    "allowed_hosts": "test_allowed_hosts_match_hosts_subdomains_and_ports",
    "allow_private": "test_loopback_is_fetched_only_if_private_ips_are_allowed",
    "allowed_directory": "test_a_file_in_the_directory_is_read_by_any_notation_of_its_path",
    "max_bytes": "test_a_response_over_the_size_limit_is_rejected",
    "max_pixels": "test_an_image_over_the_limits_is_rejected_with_its_size",
    "max_side_pixels": "test_an_image_over_the_limits_is_rejected_with_its_size",
    "max_audio_seconds": "test_audio_longer_than_the_limit_is_rejected",
    "max_decoded_bytes": "test_the_decoded_size_of_all_media_is_limited",
    "max_redirects": "test_redirects_are_limited",
    "fetch_timeout_seconds": "test_a_slow_server_hits_the_total_timeout",
}
SERVER_MEDIA = {
    **dict.fromkeys(
        (
            *("media_hosts", "media_directory", "media_allow_private", "media_fetch_seconds", "max_media_bytes"),
            *("max_image_pixels", "max_image_side", "max_audio_seconds", "max_decoded_media_bytes"),
        ),
        "test_media_settings_reach_the_models",
    ),
    "max_media": "test_the_number_of_media_in_a_request_is_limited",
}
SETTINGS = {
    **{name: "test_every_setting_is_passed_on" for name in SETTINGS_FIELDS},
    **dict.fromkeys(get_fields(ContextOptions), "test_the_commands_have_the_same_flags_for_the_model"),
    "model": "test_a_command_uses_the_file",
    "overflow": "test_the_chat_continues_after_the_context_is_full",
    "lora": "test_a_command_uses_adapters",
    "max_tokens": "test_a_command_uses_the_file",
    "stats": "test_statistics_can_be_hidden",
    "private": "test_a_private_chat_leaves_nothing_on_disk",
    "loop_guard": "test_run_stops_a_loop_with_a_message_and_status_1",
}
ASK = {
    "text": "test_the_second_turn_of_a_conversation_is_a_prefix_hit",
    "images": "test_a_conversation_saves_the_images_of_a_message",
    "audio": "test_every_audio_input_form_gives_the_same_audio",
    "options": "test_an_unknown_option_is_rejected_with_the_nearest_name",
}
CHAT_FLAGS = {  # that are not settings
    "image": "test_the_image_flag_attaches_images",
    "audio": "test_the_audio_flag_attaches_audio",
    "resume": "test_a_conversation_is_saved_and_resumed",
    "id": "test_a_conversation_is_resumed_by_its_id",
    **dict.fromkeys(("mcp", "allow", "deny"), "test_chat_calls_the_tools_of_a_server"),
}
SERVER_OLLAMA = {
    "ollama": "test_installed_models_are_listed_and_loaded_on_demand",
    "ollama_port": "test_a_port_that_is_taken_is_an_error_with_advice",
    "allow_reload": "test_a_longer_context_reloads_the_model",
    "manage_models": "test_created_models_outlive_the_server",
}
SERVER_LLAMA = {
    "default_max_tokens": "test_settings_are_defaults_of_requests",
    "default_seed": "test_settings_are_defaults_of_requests",
    "default_reasoning": "test_reasoning_can_be_turned_off_for_all_requests",
    "slots": "test_slots_can_be_turned_off",
    "slot_save_path": "test_a_saved_slot_is_restored_into_another_one",
    "metrics": "test_metrics_can_be_turned_off",
}
SERVER_WEB = {
    "web": "test_a_page_that_is_off_says_why",
    "store_conversations": "test_a_private_server_writes_nothing_of_a_request_to_disk",
    **dict.fromkeys(
        ("max_conversations", "max_conversation_messages", "max_conversation_bytes"),
        "test_limits_refuse_and_change_nothing",
    ),
}
FORMATS = dict.fromkeys(RESPONSE_FORMAT_FIELDS, "test_a_format_allows_exactly_its_texts") | {
    "text": "test_the_text_format_has_no_grammar"
}


def list_parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "command")]


def list_fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


TABLES = {
    "chat": (list_parameters(inspect.unwrap(Model.chat)), CHAT),
    "complete": (list_parameters(Model.complete), COMPLETE),
    "ask": (list_parameters(Conversation.ask), ASK),
    "afterglow chat": ([name for name in list_parameters(chat) if name not in SETTINGS_FIELDS], CHAT_FLAGS),
    "load": ([*list_parameters(afterglow.load), *get_fields(LoadOptions)], LOAD),
    "GenerationOptions": (["prompt", *get_fields(GenerationOptions)], REQUEST),
    "PromptOptions": (["messages", "tools", *get_fields(PromptOptions)], PLAN),
    "MediaPolicy": (list_fields(MediaPolicy), MEDIA),
    "ServerSettings for media": (
        [name for name in ServerSettings.model_fields if name in SERVER_MEDIA or "media" in name],
        SERVER_MEDIA,
    ),
    "ServerSettings for the Ollama API": (
        [name for name in ServerSettings.model_fields if name in SERVER_OLLAMA or "ollama" in name],
        SERVER_OLLAMA,
    ),
    "ServerSettings for llama-server": (
        [name for name in ServerSettings.model_fields if name in SERVER_LLAMA],
        SERVER_LLAMA,
    ),
    "ServerSettings for the web page": (
        [name for name in ServerSettings.model_fields if "web" in name or "conversation" in name],
        SERVER_WEB,
    ),
    "Sampling": (list_fields(Sampling), SAMPLING),
    "Request": (list_fields(Request), ENGINE_REQUEST),
    "EngineSettings": (list_fields(EngineSettings), ENGINE),
    "CheckpointSettings": (list_fields(CheckpointSettings), CHECKPOINTS),
    "GrammarConstraint": (list_fields(GrammarConstraint), CONSTRAINT),
    "ReasoningBudget": (list_fields(ReasoningBudget), REASONING_BUDGET),
    "Settings": (list(SETTINGS_FIELDS), SETTINGS),
    "response_format": (list(RESPONSE_FORMAT_FIELDS), FORMATS),
}


@cache
def collect_test_names() -> set[str]:
    """Return the names of all test functions below tests/."""
    return {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }


@pytest.mark.parametrize("table", TABLES)
def test_every_option_has_a_row_and_every_row_a_test(table: str) -> None:
    options, rows = TABLES[table]
    assert set(options) == set(rows)
    assert set(rows.values()) <= collect_test_names()


@pytest.mark.native
def test_an_unknown_option_is_rejected_with_the_nearest_name() -> None:
    with afterglow.load(models.get_path("attention"), context=64) as model:
        conversation = Conversation(model)
        for ask in (model.complete, model.chat, model.stream, model.build_request, conversation.ask):
            with pytest.raises(InvalidArgument, match="`temprature` is not an option; did you mean 'temperature'"):
                ask("Hello", temprature=1)
        for ask in (model.plan_chat, model.apply_chat_template):
            with pytest.raises(InvalidArgument, match="`tols` is not an option; did you mean 'tools'"):
                ask("Hello", tols=[])
        with pytest.raises(InvalidArgument, match="`temperature` must be a valid number, not '1'"):
            model.chat("Hello", temperature="1")
        assert not conversation.messages
