"""Attacks that no node can play alone in the arena: by peers, origins, readers, coordinators, and senders of bytes.

- Most of them claim no work, so there are no groups to count and no gain: what is asked is whether the honest side ends
  with the right bytes, the version before, a refusal by name, or a stop with a proof. Real programs or sockets play
  them, but for what is a matter of the plan, the books or the task alone.
- The one list of them: `make adversaries` has pytest play it (`tests.adversaries.trials`); docs/security.md leads here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Outsider(NamedTuple):
    """An attack, with the tests that play it by their files."""

    attack: str
    tests: Mapping[str, Sequence[str]]

    @property
    def name(self) -> str:
        """Return the name for `--only`, such as `ChunkPoisoning`."""
        return "".join(re.findall(r"\w+", self.attack.replace("'", "").title()))

    @property
    def ids(self) -> list[str]:
        """Return the ids of its tests for pytest."""
        return [f"{path}::{test}" for path, tests in self.tests.items() for test in tests]

    @property
    def played_by(self) -> str:
        """Return its tests for a table, without their classes."""
        named = {path: ", ".join(f"`{test.split('::')[-1]}`" for test in tests) for path, tests in self.tests.items()}
        return "; ".join(f"`{path}`: {names}" for path, names in named.items())


OUTSIDERS = (
    Outsider(
        "chunk poisoning",
        {
            "tests/processes/test_lying_peer.py": [
                "test_flipped_byte_in_a_chunk_is_refused_refetched_elsewhere_and_its_sender_blamed"
            ]
        },
    ),
    Outsider(
        "an edited, skipped, reordered, replayed or overlong turn",
        {
            "tests/coordinator/transactions/test_turns.py": [
                "test_a_turn_after_another_context_is_none",
                "test_a_turn_cannot_be_played_twice_or_answer_another_turn",
                "test_a_turn_is_at_most_as_long_as_its_lease_says",
                "test_tokens_after_the_end_of_an_episode_are_refused",
            ],
            "tests/coordinator/audit/test_turns.py": [
                "test_a_token_that_the_seed_did_not_dictate_fails",
                "test_a_turn_that_was_taken_after_an_edited_observation_fails",
            ],
        },
    ),
    Outsider(
        "slander by free keys",
        {
            "tests/coordinator/transactions/test_blames.py": [
                "test_slander_by_free_keys_does_not_fill_the_incidents",
                "test_invented_chunk_is_not_recorded",
                "test_blame_over_an_invented_connection_is_not_recorded",
            ]
        },
    ),
    Outsider(
        "withholding",
        {
            "tests/processes/test_frozen_peer.py": [
                "test_a_peer_frozen_in_mid_download_holds_up_nobody_and_catches_up_when_it_thaws"
            ],
            "tests/swarm_node/p2p/test_download.py": [
                "test_a_peer_that_accepts_and_stalls_costs_a_moment",
                "test_a_peer_that_drips_bytes_does_not_hold_us",
            ],
        },
    ),
    Outsider(
        "a stranger's address as one's own, or in a plan many times",
        {
            "tests/coordinator/transactions/test_hole_punching.py": [
                "test_a_node_that_reports_somebody_elses_address_as_its_own_brings_it_into_no_plan",
                "test_a_crowd_that_was_never_sent_to_a_node_cannot_have_it_unpunchable",
            ],
            "tests/swarm_node/p2p/test_punch.py": [
                "test_a_plan_that_names_a_third_partys_host_many_times_has_it_dialled_at_one_port",
                "test_new_plans_again_and_again_do_not_have_a_third_party_dialled_more_often",
            ],
        },
    ),
    Outsider(
        "upload free-riding",
        {
            "tests/processes/test_broadcasts.py": [
                "test_a_version_is_followed_to_every_nodes_first_token_and_uploads_are_what_receivers_witnessed"
            ],
            "tests/coordinator/transactions/test_links.py": ["test_nobody_praises_itself"],
            "tests/coordinator/rules/test_topology.py": ["test_good_uploaders_sit_high"],
        },
    ),
    Outsider(
        "eclipse, impostors",
        {
            "tests/processes/test_trust.py": [
                "test_version_signed_by_somebody_else_is_refused",
                "test_join_string_without_a_fingerprint_is_wrong_usage",
            ],
            "tests/swarm_node/p2p/test_defects.py": ["test_an_impostor_without_the_key_is_not_let_in"],
            "tests/swarm_node/p2p/test_download.py": ["test_nothing_but_stalling_peers_is_given_up_with_the_reason"],
            "tests/swarm_node/p2p/test_last_resort.py": ["test_the_origin_delivers_what_no_peer_can"],
        },
    ),
    Outsider(
        "rollback",
        {
            "tests/processes/test_trust.py": ["test_older_set_of_metadata_served_again_is_refused"],
            "tests/swarm_node/versions/test_updater.py": [
                "test_rollback_by_an_origin_is_refused_while_the_coordinator_is_silent"
            ],
        },
    ),
    Outsider(
        "freeze",
        {
            "tests/processes/test_trust.py": [
                "test_frozen_metadata_is_refused_once_it_expires",
                "test_silence_about_versions_stops_work_when_the_last_proof_runs_out",
            ]
        },
    ),
    Outsider(
        "mix-and-match",
        {
            "tests/processes/test_trust.py": ["test_manifest_that_is_not_the_signed_one_is_refused"],
            "tests/swarm_node/versions/test_updater.py": ["test_mix_and_match_by_an_origin_is_noticed_and_undone"],
            "tests/swarm_node/versions/test_assemble_patched.py": [
                "test_a_patch_mixed_in_from_another_version_is_refused"
            ],
        },
    ),
    Outsider(
        "fast-forward",
        {
            "tests/processes/test_key_rotation.py": ["test_fast_forward_by_all_online_keys_is_undone_by_rotating_them"],
            "tests/protocol/policy/test_trust_forged.py": [
                "TestMixAndMatch::test_fast_forward_beyond_the_last_version_is_refused"
            ],
        },
    ),
    Outsider(
        "equivocation",
        {
            "tests/processes/test_forked_ledger.py": [
                "test_running_node_that_is_shown_a_rewritten_log_says_so_keeps_the_proof_and_ends"
            ],
            "tests/processes/test_why.py": [
                "test_a_coordinator_that_tells_the_node_another_story_than_the_log_is_named"
            ],
            "tests/swarm_node/ledger/test_log_watch.py": [
                "TestPatience::test_fork_hidden_by_withholding_tiles_ends_the_node_in_the_end"
            ],
        },
    ),
    Outsider(
        "dropping the end of the ledger as lost",
        {
            "tests/coordinator/publishing/test_gaps.py": [
                "test_gaps_without_root_keys_without_a_new_ledger_key_or_not_understood_are_refused",
                "test_two_sides_of_a_gap_are_no_fork_and_one_side_is",
                "test_a_ledger_key_of_before_a_gap_never_comes_back",
            ],
            "tests/processes/test_standby.py": [
                "test_copy_that_lacks_published_entries_goes_on_only_after_a_gap_that_root_keys_sign"
            ],
        },
    ),
    Outsider(
        "silent edit of the ledger",
        {
            "tests/swarm_node/ledger/test_log.py": [
                "TestVerify::test_entry_that_was_changed_left_out_or_slipped_in_is_refused"
            ],
            "tests/coordinator/publishing/test_ledger_files.py": [
                "test_a_log_that_is_not_what_was_signed_stops_the_coordinator"
            ],
            "tests/ledger/test_store.py": ["test_rebuild_finds_damage_and_repairs_nothing"],
            "tests/ledger/test_store_log.py": ["test_nothing_is_signed_against_what_was_signed_before"],
        },
    ),
    Outsider(
        "hostile bytes at the door",
        {
            "tests/processes/test_hostile_submissions.py": [
                "test_a_hundred_megabytes_are_refused_and_memory_stays_flat",
                "test_bodies_that_are_no_message_are_refused_by_name",
            ],
            "tests/swarm_node/p2p/test_host.py": ["test_garbage_on_the_port_harms_nobody"],
        },
    ),
    Outsider(
        "requests that are dear to decode",
        {
            "tests/coordinator/api/test_heavy_requests.py": [
                "test_a_request_of_six_million_values_is_not_decoded_by_the_writer",
                "test_fragments_of_six_million_values_are_not_decoded_by_the_writer",
                "test_a_request_that_is_nothing_but_values_is_hardly_read",
            ],
            "tests/coordinator/api/test_completions.py": ["test_a_body_that_is_dear_to_read_is_not_read_without_a_key"],
        },
    ),
    Outsider(
        "a store that was altered before a payout",
        {
            "tests/coordinator/transactions/test_payouts.py": [
                "test_payees_that_were_altered_in_the_store_are_not_paid",
                "test_an_address_that_was_altered_in_the_store_is_not_paid",
                "test_a_node_that_was_given_to_another_owner_in_the_store_is_not_paid",
            ],
            "tests/coordinator/commands/test_owner_commands.py": [
                "test_a_balance_that_was_altered_in_the_store_is_not_paid"
            ],
        },
    ),
    Outsider(
        "spending the round's budget with a small API key",
        {
            "tests/coordinator/transactions/test_queries.py": [
                "test_hanging_up_after_each_lease_drains_no_more_than_the_keys_budget",
                "test_a_withdrawn_query_of_a_lost_node_frees_what_it_reserved",
            ]
        },
    ),
    Outsider(
        "resource exhaustion",
        {
            "tests/coordinator/api/test_http_bodies.py": ["test_who_never_ends_a_request_holds_no_connection"],
            "tests/coordinator/api/test_callers.py": [
                "test_answers_that_nobody_reads_are_let_go",
                "test_who_never_ends_its_first_head_is_cut_also_on_this_machine",
                "test_who_never_ends_a_later_head_is_cut_and_who_is_idle_stays",
                "test_an_unauthorised_upload_is_refused_and_not_read_to_its_end",
                "test_flooding_the_log_with_what_is_no_request_writes_nothing",
            ],
            "tests/coordinator/api/test_overload.py": [
                "test_a_crowd_of_strangers_that_reads_delays_no_node_and_not_the_round",
                "test_a_crowd_with_invented_keys_is_answered_and_takes_no_place_of_the_rounds_reads",
            ],
            "tests/coordinator/service/test_tls.py": [
                "test_who_never_ends_a_tls_handshake_is_cut_and_others_are_served",
                "test_tls_handshakes_of_one_address_count_as_its_connections",
            ],
            "tests/swarm_node/p2p/test_host.py": [
                "test_silent_sockets_are_dropped_and_do_not_keep_others_out",
                "test_one_address_cannot_take_every_window",
                "test_a_protocol_name_without_end_is_not_kept",
            ],
            "tests/swarm_node/p2p/test_full_host.py": [
                "test_however_many_streams_callers_open_from_however_many_addresses_it_has_one_for_its_parents"
            ],
            "tests/swarm_node/p2p/test_noise_handshake.py": [
                "test_half_a_word_is_waited_for_and_not_looked_at_again_and_again"
            ],
            "tests/swarm_node/p2p/test_yamux_machine.py": ["test_a_flood_of_frames_that_carry_nothing_ends"],
            "tests/swarm_node/p2p/test_slow_takers.py": [
                "test_identities_that_take_their_bytes_drop_by_drop_do_not_keep_others_from_the_turns"
            ],
            "tests/swarm_node/p2p/test_turn_times.py": [
                "test_a_requester_that_asks_and_takes_back_for_ever_keeps_no_turn"
            ],
            "tests/swarm_node/p2p/test_turns.py": ["test_a_crowd_at_one_address_keeps_nobody_at_another_out"],
        },
    ),
    Outsider(
        "lease hoarding with free keys",
        {
            "tests/adversaries/test_new_keys.py": [
                "test_lease_hoarding_with_free_keys_leaves_the_learner_nine_tenths_of_its_updates",
                "test_a_round_that_ever_new_keys_entered_first_begins_all_the_same",
                "test_newcomers_that_stay_have_their_turn_beside_ever_new_keys_that_ask_first",
            ],
            "tests/processes/test_hoarding.py": ["test_lease_hoarding_by_ever_new_keys_holds_up_no_batch"],
            "tests/coordinator/transactions/test_newcomers.py": [
                "TestEvaluations::"
                "test_what_a_hoarder_was_to_measure_goes_to_another_at_once_and_the_first_answer_counts"
            ],
        },
    ),
    Outsider(
        "a broadcast held up by free keys",
        {
            "tests/coordinator/transactions/test_feeders.py": [
                "test_free_keys_that_fetch_nothing_feed_nobody_and_vouch_for_nobody",
                "test_free_keys_of_the_first_version_are_out_of_the_second",
                "test_a_crowd_that_fetches_and_gives_nothing_is_a_few_parents_at_a_time",
                "test_a_node_whose_work_was_found_right_is_judged_by_such_alone",
            ],
            "tests/coordinator/rules/test_topology.py": ["test_free_keys_that_join_slow_nobody_down"],
            "tests/swarm_node/picker/test_mute.py": [
                "test_a_parent_that_never_delivers_costs_its_first_word_however_little_the_seeder_helps",
                "test_what_was_taken_back_from_a_parent_that_never_delivered_is_asked_of_the_other_without_its_word",
            ],
            "tests/processes/test_free_keys.py": [
                "test_free_keys_that_arrive_are_asked_nothing_by_those_whom_the_swarm_knows",
                "test_a_round_that_free_keys_join_first_is_theirs_for_one_version_at_most",
            ],
        },
    ),
    Outsider(
        "a round that lies about its payouts, a forged or old directory, a curator who shows two of them",
        {
            "tests/processes/test_directory.py": [
                "test_of_three_rounds_the_one_that_lies_is_refused_and_a_node_joins_and_moves",
            ],
            "tests/ledger/test_listing.py": [
                "test_an_entry_copied_under_another_title_is_refused",
                "test_two_entries_for_one_round_are_refused",
                "test_a_listing_that_contradicts_what_the_curator_saw_is_a_lie",
            ],
            "tests/swarm_node/ledger/test_listing_check.py": [
                "test_a_round_that_lies_about_a_total_is_refused_by_name",
                "test_entries_that_were_changed_on_the_way_leave_a_listing_unproved",
            ],
            "tests/swarm_node/ledger/test_directories.py": [
                "test_a_curator_who_shows_two_directories_with_one_number_is_caught_by_who_sees_both",
                "test_who_asks_for_a_witness_sees_what_the_witness_saw",
                "test_a_witness_signs_one_file_for_each_number_and_none_that_is_older",
                "test_a_mirror_that_serves_yesterdays_file_is_named_and_not_believed",
                "test_a_directory_of_the_internet_cannot_send_this_machine_into_its_own_network",
            ],
        },
    ),
    Outsider(
        "names that imitate",
        {
            "tests/coordinator/transactions/test_naming.py": [
                "test_a_copy_of_anothers_name_is_shown_with_its_own_id",
                "test_whoever_imitates_the_operator_or_a_nickname_is_shown_with_its_id",
                "test_a_squatter_gives_way_to_whoever_has_earned",
                "test_no_name_keeps_anybody_from_joining_and_an_owner_may_use_its_own_again",
            ],
        },
    ),
    Outsider(
        "a server that shows a browser a false ledger",
        {
            "tests/coordinator/pages/test_verify.py": [
                "test_an_altered_entry_is_named_with_a_link",
                "test_a_truncated_log_is_found",
                "test_a_wrong_signature_is_found",
                "test_a_foreign_key_is_found",
                "test_another_history_that_a_witness_signed_is_found",
                "test_notes_that_no_witness_signed_are_not_said_to_be_of_witnesses",
            ],
        },
    ),
    Outsider(
        "a log that shows a witness two histories, or a witness that lies to the coordinator",
        {
            "tests/swarm_node/ledger/test_witnessing.py": [
                "test_an_old_checkpoint_is_not_signed_again_even_after_a_restart",
                "test_of_many_requests_at_once_one_is_signed",
                "test_who_reads_the_log_must_continue_what_was_signed_when_the_log_called",
                "test_what_a_witness_saw_before_it_had_a_record_counts",
                "test_a_witness_whose_record_is_damaged_signs_nothing",
            ],
            "tests/coordinator/service/test_witness_calls.py": [
                "test_a_witness_that_signs_something_else_is_not_believed",
                "test_a_huge_a_slow_and_a_redirecting_witness_cost_their_signature_alone",
            ],
        },
    ),
    Outsider(
        "entries for ever by free keys",
        {
            "tests/coordinator/transactions/test_owners.py": [
                "test_a_free_owner_adds_no_entry_by_however_many_nodes_addresses_and_revocations",
                "test_ever_new_addresses_have_an_end_every_day",
            ],
            "tests/coordinator/transactions/test_appeals.py": [
                "TestEntries::test_appeals_of_free_keys_are_no_entries_before_they_are_ruled_on"
            ],
        },
    ),
    Outsider(
        "a version whose tokenizer amplifies",
        {
            "tests/processes/test_hostile_version.py": [
                "test_a_hostile_tokenizer_costs_its_version_and_the_node_goes_on_with_the_next"
            ],
            "tests/swarm_node/commands/test_bench.py": [
                "test_a_hostile_tokenizer_takes_the_memory_of_the_engine_and_not_of_the_command"
            ],
            "tests/swarm_node/engine/test_hostile_tokenizers.py": [
                "test_a_tokenizer_that_amplifies_a_text_costs_the_agent_nothing",
            ],
            "tests/swarm_node/engine/test_client.py": ["test_a_child_that_takes_too_much_memory_is_stopped_and_named"],
            "tests/swarm_node/work/test_worker.py": ["test_an_unusable_version_is_named_and_left_until_the_next_one"],
        },
    ),
    Outsider(
        "a version that fills a disk",
        {
            "tests/swarm_node/versions/test_follower.py": [
                "test_a_gigabyte_of_one_repeated_chunk_is_refused_by_name_before_a_byte_is_fetched"
            ],
            "tests/protocol/policy/test_folder.py": [
                "test_many_files_of_one_chunk_are_one_large_file",
                "test_a_patch_that_unfolds_is_refused",
            ],
        },
    ),
    Outsider(
        "an address that leads nowhere, or elsewhere",
        {
            "tests/coordinator/transactions/test_dialable.py": [
                "test_an_address_that_nobody_can_dial_is_rejected",
                "test_an_address_of_a_network_that_others_are_not_in_is_left_out",
            ]
        },
    ),
    Outsider(
        "other sites, ports and users at an owner's page",
        {
            "tests/swarm_node/owner/test_page_access.py": [
                "test_a_name_that_was_rebound_to_this_machine_reads_and_changes_nothing",
                "test_a_form_of_another_page_changes_nothing_even_with_the_cookie",
                "test_a_token_from_a_history_or_a_list_of_processes_is_worth_nothing",
                "test_slow_clients_hold_up_nobody_for_long",
                "test_an_address_that_is_no_address_does_not_end_the_agent",
            ],
            "tests/swarm_node/owner/test_page_browser.py": [
                "test_a_page_of_another_port_reads_and_changes_nothing_even_if_it_knows_the_address",
            ],
        },
    ),
    Outsider(
        "a site whose name leads to a private round",
        {
            "tests/coordinator/api/test_http.py": [
                "test_a_page_of_another_site_cannot_read_a_private_round_under_its_own_name",
            ],
        },
    ),
    Outsider(
        "a hostile router",
        {
            "tests/swarm_node/reach/test_hostile_router.py": [
                "test_a_hostile_description_costs_the_mapping_and_nothing_else",
                "test_an_answer_to_the_search_that_points_elsewhere_is_passed_over",
                "test_an_external_address_that_nobody_can_dial_is_reported_and_not_advertised",
                "test_a_flood_of_garbage_does_not_hold_the_node",
                "test_a_reply_of_another_machine_is_not_heard",
            ],
            "tests/swarm_node/reach/test_real_router.py": [
                "test_a_node_behind_a_vpn_does_not_give_its_home_address_away",
                "test_a_mapping_of_another_machine_is_not_stolen",
            ],
        },
    ),
    Outsider(
        "a forged, cut, oversized or replayed handshake, keys of low order",
        {
            "tests/swarm_node/p2p/test_noise_xx.py": [
                "test_a_wrong_message_ends_the_handshake_for_good",
                "test_a_static_key_of_low_order_proves_nothing_and_is_refused",
            ],
            "tests/swarm_node/p2p/test_noise_handshake.py": ["test_a_message_above_the_bound_is_refused_at_its_length"],
        },
    ),
    Outsider(
        "code in an answer that a library reads",
        {
            "tests/coordinator/tasks/test_reward_shipped.py": ["test_code_in_a_strangers_answer_is_not_run"],
            "tests/coordinator/tasks/test_sandbox.py": [
                "test_an_attack_is_named_and_costs_one_group",
                "test_code_that_attacks_when_it_is_loaded_is_in_the_sandbox_already",
            ],
        },
    ),
    Outsider(
        "a crowd that shares its work",
        {"tests/adversaries/test_crowd.py": ["test_many_identities_that_forge_gain_no_more_than_one"]},
    ),
    Outsider(
        "poisoning by one owner's many groups",
        {
            "tests/coordinator/transactions/test_shares.py": [
                "TestShares::test_no_owner_gets_more_than_its_share_of_work_and_batch_among_many"
            ],
            "tests/coordinator/transactions/test_escrow.py": [
                "TestFaults::test_what_was_trained_on_before_a_fault_is_still_known"
            ],
        },
    ),
    Outsider(
        "invented X-Forwarded-For",
        {
            "tests/coordinator/api/test_caller.py": [
                "test_a_node_that_writes_x_forwarded_for_itself_stays_the_neighbour_that_it_is"
            ],
            "tests/coordinator/api/test_probes.py": ["test_nobody_makes_the_coordinator_dial_an_address_of_his_choice"],
        },
    ),
    Outsider(
        "a learner that does something else than it says",
        {
            "tests/coordinator/learner/test_learner_cheats.py": [
                "test_a_learner_that_does_something_else_than_it_commits_to_is_found_by_the_replay",
                "test_a_learner_whose_commitments_are_no_chain_is_found_by_everybody_who_reads_the_log",
                "test_a_batch_of_groups_that_no_node_signed_is_found_before_the_replay",
            ]
        },
    ),
    Outsider(
        "files for a replay that run code or evade a verdict",
        {
            "tests/coordinator/learner/test_checkpoint.py": [
                "test_reading_a_checkpoint_runs_no_code",
                "test_bytes_in_the_place_of_a_tensor_run_no_code",
            ],
            "tests/coordinator/learner/test_hostile_replays.py": [
                "test_a_start_with_files_that_could_run_or_name_code_is_not_loaded",
                "test_files_that_no_learner_can_have_used_do_not_match",
            ],
        },
    ),
    Outsider(
        "a cheat among real processes",
        {"tests/processes/test_auditor.py": ["test_a_node_that_swaps_tokens_is_banned_and_an_honest_one_is_paid"]},
    ),
)


def chosen(only: Sequence[str]) -> list[Outsider]:
    """Return the attacks with these names; all if none is given."""
    return [outsider for outsider in OUTSIDERS if not only or outsider.name in only]
