"""What the telemetry promises, and the tests that inject the fault: here where they need whole processes, beside their
module where they do not. test_index.py checks that each one named exists.

1. Emit never blocks or fails training.
   tests/test_telemetry.py::test_a_hung_disk_costs_bounded_memory_and_no_time
   tests/test_telemetry.py::test_a_bad_call_is_counted_and_not_raised
   tests/e2e/test_launch.py::test_a_store_that_dies_with_its_collector_still_lets_the_run_finish
   tests/e2e/test_harmless.py::test_results_are_the_same_recorded_unrecorded_and_uncollected
2. Acked means stored.
   tests/promises/test_02_acked_is_stored.py::test_whole_collectors_keep_what_they_acknowledged
   tests/promises/test_02_acked_is_stored.py::test_the_writer_keeps_what_it_acknowledged
   tests/e2e/test_launch.py::test_a_collector_that_dies_is_replaced_while_the_run_goes_on
3. kill -9 a producer: what was spooled arrives; at most the unsynced last batch is missing, and counted.
   tests/test_spool.py::test_kill_9_loses_at_most_the_unsynced_and_counts_it
   tests/test_spool.py::test_the_real_collector_stores_each_item_once_through_two_kills
   tests/test_spool.py::test_a_torn_last_record_is_left_out_and_counted
4. Bounded memory and disk; drops are counted by reason and shown.
   tests/promises/test_04_bounded.py::test_what_the_spool_had_no_room_for_is_shown
   tests/promises/test_04_bounded.py::test_what_the_queue_had_no_room_for_is_shown
5. Duplicated, reordered, late batches converge to identical tables.
   tests/collectors/test_writer.py::test_order_and_duplicates_do_not_matter
6. Disk full, read-only directory, corrupt or newer database file: a clear error, nothing overwritten.
   tests/promises/test_06_broken_storage.py::test_a_full_disk_refuses_and_the_same_collector_goes_on_when_there_is_room
   tests/promises/test_06_broken_storage.py::test_a_corrupt_file_is_told_and_kept
   tests/test_spool.py::test_a_full_disk_drops_and_recovers
7. Hostile payloads get their status, the rest of the stream is unharmed.
   tests/promises/test_07_hostile_payloads.py::test_mutated_protobuf
   tests/promises/test_07_hostile_payloads.py::test_each_kind_of_bomb_has_its_status
8. Readers never block the writer; a heavy query is cut off.
   tests/promises/test_08_readers.py::test_batches_are_acknowledged_while_heavy_queries_run
   tests/promises/test_08_readers.py::test_quack_refuses_what_does_not_end
   tests/test_store.py::test_a_statement_ends_with_its_client
9. Bearer token wherever it does not bind to loopback.
   tests/promises/test_09_tokens.py::test_beyond_loopback_nothing_is_said_without_the_token
   tests/promises/test_09_tokens.py::test_tokens_are_compared_in_constant_time
10. Text capture modes off, redacted, full.
   tests/test_telemetry.py::test_no_text_leaves_unless_captured_in_full
   tests/test_telemetry.py::test_no_text_of_other_libraries_leaves_unless_captured_in_full
11. Cardinality guard on metric labels; overflow visible.
   tests/collectors/test_cardinality.py::test_series_beyond_the_limit_are_refused_and_told
   tests/collectors/test_cardinality.py::test_a_process_has_a_limit_over_all_metrics
12. Linkage is complete.
   tests/e2e/test_launch.py::test_a_collector_that_dies_is_replaced_while_the_run_goes_on
"""
