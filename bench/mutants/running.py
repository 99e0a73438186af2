"""Defects of the runtime: exchanges, replicas, faults, checkpoints."""

from __future__ import annotations

from bench.mutants.mutant import Mutant

_SAVES, _TRANSPORT = "tests/runtime/test_saves.py", "tests/runtime/test_transport.py"
_WATCH, _VERDICT, _YARD = (f"tests/runtime/test_{name}.py" for name in ("watch", "verdict", "yard"))
_REPLICAS, _ORDER = "tests/runtime/test_replicas.py", "tests/runtime/test_order.py"

_GATHER = "        ctx.hosted = hosted\n        hosted.begin()\n"
_GATHER_BY_VERSION = """\
        ctx.hosted = hosted
        owner = (hosted.copies.digest, *((one.data_ptr(), one._version) for one in hosted.parameters))
        owners = hosted.yard.workspace.__dict__.setdefault("owners", {})
        if owners.get(hosted.site, (None,))[0] == owner:
            hosted.weights, hosted.slot, hosted.turn, hosted._gather = owners[hosted.site][1]
        else:
            hosted.begin()
            owners[hosted.site] = owner, (hosted.weights, hosted.slot, hosted.turn, hosted._gather)
"""

ONCE_REAL = [  # the first version had these
    Mutant(
        "replicas are gathered when a version counter says so",
        "runtime/layers/replicas.py",
        _GATHER,
        _GATHER_BY_VERSION,
        f"{_REPLICAS}::test_replicas_are_exact_whatever_steps_the_parameters_in_every_precision",
    ),
    Mutant(
        "rows travel in the activations' dtype under autocast",
        "runtime/layers/precision.py",
        "return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype",
        "return x.dtype",
        f"{_REPLICAS}::test_one_rule_for_precision",
    ),
    Mutant(
        "a second wait after an error succeeds",
        "runtime/transport/api.py",
        "                self._error = error\n                raise\n",
        "                self._finished = True\n                raise\n",
        f"{_TRANSPORT}::test_a_failed_exchange_fails_at_every_wait",
    ),
    Mutant(
        "only the first wait joins",
        "runtime/transport/api.py",
        "        if self._join is not None:\n            self._join()\n",
        "            if self._join is not None:\n                self._join()\n",
        f"{_TRANSPORT}::test_every_wait_joins_and_only_the_first_finishes",
    ),
    Mutant(
        "a wait joins the stream that started",
        "runtime/transport/nccl.py",
        "stream = torch.cuda.current_stream(self.deck.device)\n",
        "stream = self._kept.stream\n",
        f"{_TRANSPORT}::test_on_streams_a_wait_is_for_the_stream_that_waits",
    ),
    Mutant(
        "optimizer state is pickled on its device",
        "runtime/layers/move.py",
        "return cls(value.detach().cpu(),",
        "return cls(value.detach(),",
        f"{_TRANSPORT}::test_single_values_of_optimizer_state_travel_on_the_cpu",
    ),
    Mutant(
        "a save behind the caller waits for the write",
        "runtime/state/checkpoint.py",
        "thread.shutdown(wait=False)",
        "thread.shutdown(wait=True)",
        f"{_SAVES}::test_a_save_behind_the_caller_has_what_was_there_when_it_was_asked_for",
    ),
    Mutant(
        "a save behind the caller copies nothing",
        "runtime/state/checkpoint.py",
        "tensors, buffer = _staging.copies(part.tensors)",
        "tensors, buffer = part.tensors, np.empty(0, np.uint8)",
        f"{_SAVES}::test_a_save_behind_the_caller_has_what_was_there_when_it_was_asked_for",
    ),
    Mutant(
        "layers are not told apart",
        "runtime/layers/experts.py",
        "return self.expert_site.number",
        "return 1",
        f"{_ORDER}::test_equal_layers_in_another_order_are_told_apart",
    ),
    Mutant(
        "a copied layer has its original's number",
        "runtime/layers/share.py",
        "        return Site(self.yard, self.family)\n",
        "        return self\n",
        f"{_ORDER}::test_equal_layers_in_another_order_are_told_apart",
    ),
    Mutant(
        "homes are not compared",
        "runtime/layers/routes.py",
        "        homes=small_digest(",
        "        homes=0 * small_digest(",
        f"{_ORDER}::test_other_homes_are_named_though_the_plan_is_known",
    ),
    Mutant(
        "plans are forgotten with every change",
        "runtime/agree/agreement.py",
        "self._caches.setdefault(digest, PlanCache())",
        "self._caches[digest] = PlanCache()",
        f"{_ORDER}::test_a_change_that_changes_nothing_leaves_the_plans_alone",
    ),
    Mutant(
        "experts move before all have agreed",
        "runtime/layers/move.py",
        "    all_or_none(floor, error, InvalidPlacement)  # before anything moves\n",
        "    if error:\n        raise error\n",
        f"{_ORDER}::test_experts_move_on_all_ranks_or_on_none",
    ),
    Mutant(
        "torch's own all-to-all runs on the user's group",
        "runtime/yard.py",
        "self.rank, self.device, self.groups.whole,",
        "self.rank, self.device, dist.group.WORLD,",
        f"{_ORDER}::test_unplanned_rows_travel_on_a_group_of_the_yards_own",
    ),
    Mutant(
        "who went astray is not looked for",
        "runtime/faults/verdict.py",
        "    if strayed := _strayed(found):\n",
        "    if strayed := []:\n",
        f"{_VERDICT}::test_who_went_astray_is_to_blame_wherever_it_is_now",
    ),
    Mutant(
        "who waits for a gather behind the training is taken for one that stays away",
        "runtime/transport/behind.py",
        "self._behind.transport.deck.guard.waiting(self._future.result)",
        "self._future.result()",
        f"{_WATCH}::test_who_waits_for_a_gather_behind_the_training_is_not_elsewhere",
    ),
    Mutant(
        "checkpoints are pruned by step",
        "runtime/state/folders.py",
        "(_saved(one), int(match[1]), int(match[2] or 1), one)",
        "(int(match[1]), int(match[2] or 1), _saved(one), one)",
        f"{_SAVES}::test_the_last_one_saved_is_there_and_the_latest_whatever_its_step",
    ),
    Mutant(
        "pickles are read unasked",
        "runtime/state/checkpoint.py",
        "return PickledCheckpoint(path, floor, allow_pickle)",
        "return PickledCheckpoint(path, floor, True)",
        f"{_SAVES}::test_no_pickle_is_read_unless_asked_for",
    ),
    Mutant(
        "a backend's error names nobody",
        "runtime/faults/guard.py",
        "        except RuntimeError as error:\n            raise self.lost(",
        "        except ConnectionError as error:\n            raise self.lost(",
        f"{_WATCH}::test_a_backends_error_becomes_ours",
    ),
    Mutant(
        "a collective is made unwatched",
        "runtime/layers/precision.py",
        "import torch\n",
        "import torch\nimport torch.distributed as dist\n\n\ndef meet():\n    dist.barrier()\n",
        "tests/core/test_rooms.py::test_every_collective_is_watched",
    ),
    Mutant(
        "the watch shares the rank's client",
        "runtime/faults/client.py",
        "if isinstance(inner, FileStore):",
        "if isinstance(inner, FileStore | TCPStore):",
        f"{_WATCH}::test_a_rank_that_waits_for_a_key_answers_the_roll_call",
    ),
]

RUNNING = [
    *ONCE_REAL,
    Mutant(
        "sums over copies are rounded to what travels",
        "runtime/layers/replicas.py",
        "wide = torch.promote_types(grads[0].dtype, torch.float32)",
        "wide = grads[0].dtype",
        f"{_REPLICAS}::test_sums_over_copies_are_not_rounded_to_what_travels",
    ),
    Mutant(
        "a damaged piece is loaded",
        "runtime/state/reading.py",
        "if zlib.crc32(buffer) != piece[4]:",
        "if zlib.crc32(buffer) < 0:",
        f"{_SAVES}::test_a_damaged_file_is_an_error",
    ),
    Mutant(
        "half a checkpoint is the latest",
        "runtime/state/folders.py",
        " and (one / ABOUT).exists()\n",
        "\n",
        f"{_SAVES}::test_half_a_checkpoint_is_not_seen",
    ),
    Mutant(
        "a save that fails leaves its bytes",
        "runtime/state/folders.py",
        "shutil.rmtree(hidden(folder, name), ignore_errors=True)",
        "pass",
        f"{_SAVES}::test_no_room_is_an_error_and_the_old_ones_stay",
    ),
    Mutant(
        "two saves are written at once",
        "runtime/state/checkpoint.py",
        "        _under_way.pop().say_unheard()\n",
        "        _under_way.pop()\n",
        f"{_SAVES}::test_the_next_save_waits_for_the_one_under_way",
    ),
    Mutant(
        "who is late is blamed beside who is gone",
        "runtime/faults/verdict.py",
        "late = [] if gone else _late(found)",
        "late = _late(found)",
        f"{_VERDICT}::test_who_is_to_blame",
    ),
    Mutant(
        "calls of different kinds meet",
        "runtime/agree/floor.py",
        "if (said == said[0]).all():",
        "if (said[:, 1] == said[0, 1]).all():",
        f"{_WATCH}::test_who_comes_for_another_call_is_named",
    ),
    Mutant(
        "groups of a device are aborted one by one",
        "runtime/transport/channels.py",
        "        thread.start()\n    for thread in threads:\n",
        "        thread.start()\n",
        f"{_WATCH}::test_all_groups_of_a_device_are_aborted_together",
    ),
    Mutant(
        "torch's watchdog sleeps with a lock that exchanges want",
        "runtime/transport/channels.py",
        ', "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}',
        "}",
        f"{_WATCH}::test_torchs_watchdog_leaves_our_groups_alone",
    ),
    Mutant(
        "a work that never ends is not told of",
        "runtime/faults/vigil.py",
        "if not done and waited > self._longest:",
        "if not done and waited < 0:",
        f"{_WATCH}::test_the_vigil_tells_of_works_that_do_not_end_or_fail",
    ),
    Mutant(
        "a buffer is lent twice",
        "runtime/transport/buffers.py",
        "return self._free.pop(i)",
        "return buffer",
        f"{_YARD}::test_an_arena_lends_a_buffer_to_one_at_a_time_and_grows",
    ),
    Mutant(
        "a buffer that grows on one rank makes it gather alone",
        "runtime/transport/buffers.py",
        "            self._buffers[key, dtype, device] = buffer\n",
        "            self._buffers[key, dtype, device] = buffer\n            self.turn += 1\n",
        f"{_YARD}::test_a_workspace_grows_and_numbers_its_fillings",
    ),
    Mutant(
        "a slow rail is called dead",
        "runtime/observe/measure.py",
        "np.maximum(factor.round(3), 0.001)",
        "factor.round(3)",
        f"{_YARD}::test_a_rail_that_lives_is_never_called_dead",
    ),
    Mutant(
        "the plan cache drops what was used last",
        "runtime/agree/plans.py",
        "        self._plans.move_to_end(key)\n",
        "",
        f"{_YARD}::test_the_plan_cache_keeps_what_was_used_last",
    ),
    Mutant(
        "a node sends and receives in one channel",
        "runtime/transport/channels.py",
        "return bit, src_node >> bit & 1",
        "return bit, 0",
        f"{_YARD}::test_in_a_channel_a_node_only_sends_or_only_receives",
    ),
    Mutant(
        "plans of other traffic have the same digest",
        "runtime/agree/digests.py",
        "told = [schedule.traffic.fingerprint]",
        'told = [b""]',
        f"{_YARD}::test_a_plan_digest_tells_plans_apart_without_their_transfers",
    ),
    Mutant(
        "clusters are told apart by sums of floats",
        "runtime/agree/digests.py",
        "value.dtype == np.int64",
        "value.itemsize == 8",
        f"{_YARD}::test_a_digest_knows_which_two_of_a_thousand_nics_are_dead[one0-other0]",
    ),
    Mutant(
        "a misspelt switch is on",
        "runtime/options.py",
        'if value not in ("on", "off"):',
        "if not value:",
        "tests/runtime/test_off.py::test_an_unknown_switch_is_refused",
    ),
    Mutant(
        "an expert's drawn numbers are drawn again",
        "runtime/hf/compute.py",
        "return not learns and not draws",
        "return not learns",
        "tests/hf/test_compute.py::test_an_activation_that_trains_or_draws_is_not_computed_again",
    ),
    Mutant(
        "sums over choices are narrow",
        "runtime/block/plain.py",
        "sums = rows.new_zeros((tokens, rows.shape[1]), dtype=wide(rows.dtype))",
        "sums = rows.new_zeros((tokens, rows.shape[1]))",
        "tests/runtime/test_grouped.py::test_sums_over_choices_are_wide_whether_or_not_all_are_choices",
    ),
    Mutant(
        "the backward pass reads a workspace that somebody else uses",
        "runtime/block/linear.py",
        "ctx.save_for_backward(rows, ends, weight if how.again is None else None)",
        "ctx.save_for_backward(rows, ends, weight); how = how._replace(again=None)",
        "tests/runtime/test_grouped.py::test_rows_times_their_experts_own_matrix",
    ),
    Mutant(
        "the last copy is not added on the way back",
        "runtime/layers/once.py",
        "for count in splits:",
        "for count in splits[:-1]:",
        "tests/runtime/test_once_ranks.py::test_ranks_without_tokens_take_part",
    ),
    Mutant(
        "rows cross once whether it pays or not",
        "dedup.py",
        "return once_seconds(cluster, once_RR, fan_RR, row_bytes) < WORTH * exchange_seconds(",
        "return True or exchange_seconds(",
        "tests/runtime/test_once_ranks.py::test_auto_takes_it_where_it_pays",
    ),
    Mutant(
        "gathers across a wan wait for rows inside a datacenter",
        "runtime/transport/light.py",
        "slice(1) if reach == 0 else slice(reach, 3)",
        "slice(3)",
        "tests/runtime/test_light.py::test_a_job_waits_for_rows_that_reach_as_far[2-1]",
    ),
    Mutant(
        "a job that was waited for lets later ones pass",
        "runtime/transport/light.py",
        "self._jobs += 1\n        return self._jobs",
        "return 1",
        "tests/runtime/test_light.py::test_jobs_are_numbered_on_whoever_gives_them",
    ),
    Mutant(
        "of two that differ both are blamed, whatever other groups do",
        "runtime/faults/verdict.py",
        "    return apart or list(place)",
        "    return list(place)",
        "tests/runtime/test_verdict.py::test_of_two_that_differ_the_other_families_tell_who_strayed",
    ),
    Mutant(
        "a group is connected for as long as gloo likes",
        "runtime/transport/channels.py",
        "seconds, lambda: gloo(",
        "1e6, lambda: gloo(",
        f"{_TRANSPORT}::test_a_group_whose_rank_never_connects_is_given_up",
    ),
]
