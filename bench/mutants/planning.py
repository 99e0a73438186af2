"""Defects of the planning core and its files."""

from __future__ import annotations

from bench.mutants.mutant import Mutant

_ASSIGN, _BAD = "tests/core/test_assign.py", "tests/core/test_bad_input.py"
_BOUNDS, _ESTIMATE, _VERIFY = (
    "tests/core/test_bounds.py",
    "tests/core/test_estimate.py",
    "tests/core/test_verify.py",
)
_LAYERS, _KERNELS = "tests/core/test_layers.py", "tests/core/test_kernels.py"

ONCE_REAL = [  # the first version had these
    Mutant(
        "rows are added up in floats",
        "assignment.py",
        "return frozen(run_sums(*runs, self.num_ranks))",
        "return frozen(run_sums(*runs, self.num_ranks).astype(float).astype(np.int64))",
        f"{_ASSIGN}::test_counts_beyond_floats_stay_exact",
    ),
    Mutant(
        "a sum of rows wraps round",
        "arrays.py",
        "if int(counts.max()) * counts.size >= 2**62 and (total := sum(counts.ravel().tolist())) >= 2**62:",
        "if (total := int(counts.sum())) >= 2**62:",
        f"{_BAD}::test_rows_whose_sum_leaves_64_bits_are_refused",
    ),
    Mutant(
        "unsigned counts turn negative",
        "arrays.py",
        'array.dtype.kind == "u" and array.max() >= 2**62',
        'array.dtype.kind == "u" and array.max() >= 2**64',
        f"{_BAD}::test_unsigned_counts_do_not_turn_negative",
    ),
    Mutant(
        "nan is a number of bytes",
        "traffic.py",
        "if not (whole and 1 <= value <= 2**40 and int(value) == value):",
        "if not whole or value < 1:",
        f"{_BAD}::test_row_bytes_must_be_whole",
    ),
    Mutant(
        "the estimate of a listed schedule knows no wan",
        "estimate.py",
        "if cluster.datacenters > 1:\n        return _by_time(",
        "if cluster.datacenters > 99:\n        return _by_time(",
        f"{_ESTIMATE}::test_a_listed_schedule_of_datacenters_knows_its_wan",
    ),
    Mutant(
        "the reference executor ignores `after`",
        "execute.py",
        "self.waits = np.diff(program.after_ptr).tolist()",
        "self.waits = [0] * program.num_stages",
        f"{_VERIFY}::test_the_reference_executor_starts_by_after_not_by_the_number_of_a_stage",
    ),
    Mutant(
        "a plan for the stand-in does not say so",
        "planners/__init__.py",
        "placement = placement.assuming()",
        "pass",
        "tests/core/test_place.py::test_a_plan_without_a_model_says_so",
    ),
    Mutant(
        "a choice of hosts for the stand-in does not say so",
        "assign.py",
        "model_assumed=assumed)",
        "model_assumed=False)",
        "tests/core/test_place.py::test_a_plan_without_a_model_says_so",
    ),
    Mutant(
        "the command's JSON hides the stand-in",
        "cli/plan.py",
        '"model_assumed": model is None',
        '"model_assumed": False',
        "tests/core/test_plan_command.py::test_a_plan_without_a_model_says_so_in_one_line",
    ),
    Mutant(
        "many flows are simulated exactly, for ever",
        "sim/flow.py",
        "return next((tolerance for most, tolerance in _STEPS if flows <= most), _LARGE)",
        "return 0.0",
        "tests/core/test_simulate_command.py::test_the_tolerance_follows_from_the_size_unless_given",
    ),
    Mutant(
        "a deep TOML file ends in a traceback",
        "formats/clusters.py",
        "except RecursionError:",
        "except ZeroDivisionError:",
        f"{_BAD}::test_a_hostile_cluster_file_gets_one_line",
    ),
    Mutant(
        "a file that is not UTF-8 ends in a traceback",
        "formats/clusters.py",
        "except ValueError as error:  # also: not UTF-8",
        "except tomllib.TOMLDecodeError as error:  # also: not UTF-8",
        f"{_BAD}::test_a_hostile_cluster_file_gets_one_line",
    ),
    Mutant(
        "an array's header is believed",
        "formats/arrays.py",
        'if promised != len(content) or file.read(1) != b"":',
        "if promised < 0:",
        f"{_BAD}::test_a_header_that_lies_is_not_believed",
    ),
    Mutant(
        "a planner reaches a scheduler by way of another module",
        "cost.py",
        "from dataclasses import dataclass\n",
        "from dataclasses import dataclass\n\n\ndef late():\n    import moeyard.schedulers\n",
        f"{_LAYERS}::test_families_do_not_reach_each_other",
    ),
    Mutant(
        "an edited kernel keeps the old one's objects",
        "kernels/compile.py",
        "        digest.update(hashlib.sha256(path.read_bytes()).digest())\n",
        "",
        f"{_KERNELS}::test_the_stamp_knows_every_file",
    ),
]

PLANNING = [
    *ONCE_REAL,
    Mutant(
        "a stage may wait for a later one",
        "verify.py",
        "late = (stages.after >= stage) | (stages.after < 0)",
        "late = stages.after < 0",
        f"{_VERIFY}::test_after_names_earlier_stages_only",
    ),
    Mutant(
        "rows may cross a dead nic",
        "verify.py",
        "refuse(~same_node & dead,",
        "refuse(same_node & dead,",
        f"{_VERIFY}::test_dead_nics_carry_nothing",
    ),
    Mutant(
        "who holds some of the rows may send all",
        "kernels/program/verify.py",
        "if held < end - begin:",
        "if held < 1:",
        f"{_VERIFY}::test_each_way_to_be_illegal_is_named",
    ),
    Mutant(
        "a row may make a hop twice",
        "kernels/program/verify.py",
        "table[b, START] < table[a, START] + table[a, ROWS]",
        "table[b, START] == table[a, START]",
        f"{_VERIFY}::test_each_way_to_be_illegal_is_named",
    ),
    Mutant(
        "the law has no knee",
        "kernels/common/law.py",
        "max(0.0, flows - law[1])",
        "flows",
        f"{_BOUNDS}::test_direct_pays_for_flows_by_the_contention_law",
    ),
    Mutant(
        "the bound looks at senders alone",
        "bounds.py",
        "for flow in (rows, rows.T):",
        "for flow in (rows,):",
        f"{_BOUNDS}::test_between_nodes_all_live_nics_bind_together",
    ),
    Mutant(
        "the bound gives a node its best nic alone",
        "bounds.py",
        "nic_NM.sum(axis=1), row_bytes, across",
        "nic_NM.max(axis=1), row_bytes, across",
        f"{_BOUNDS}::test_between_nodes_all_live_nics_bind_together",
    ),
    Mutant(
        "the bound knows no wan",
        "bounds.py",
        "np.full(len(off_dc), cluster.wan.bandwidth)",
        "np.full(len(off_dc), cluster.scale_out.bandwidth)",
        f"{_BOUNDS}::test_the_wan_binds_between_datacenters",
    ),
    Mutant(
        "the way back keeps the order of stages",
        "schedule.py",
        "flipped[:, 0] = self.num_stages - 1 - flipped[:, 0]",
        "pass",
        "tests/core/test_saved.py::test_the_way_back_survives_its_file",
    ),
    Mutant(
        "a bit is a tenth of a byte",
        "units.py",
        '("bit", 0.125)',
        '("bit", 0.1)',
        "tests/core/test_units.py::test_rates",
    ),
    Mutant(
        "a forecast loses rows",
        "forecast.py",
        "rows[r, order[r, :left]] += 1",
        "rows[r, order[r, :left]] += 0",
        "tests/core/test_forecast.py::test_each_rank_keeps_its_rows",
    ),
    Mutant(
        "the critical path runs backwards",
        "timeline.py",
        "np.array(chain[::-1], dtype=np.int64)",
        "np.array(chain, dtype=np.int64)",
        "tests/core/test_timeline.py::test_utilisation_per_link_and_rail",
    ),
    Mutant(
        "a simulated figure may be called measured",
        "provenance.py",
        "if self.source is Source.MEASURED and self.network is Network.SIMULATED:",
        "if self.source is Source.PUBLISHED and self.network is Network.SIMULATED:",
        "tests/core/test_provenance.py::test_what_cannot_be_true_cannot_be_made",
    ),
    Mutant(
        "published by nobody",
        "provenance.py",
        "if (self.source is Source.PUBLISHED) != bool(self.paper):",
        "if self.source is not Source.PUBLISHED and self.paper:",
        "tests/core/test_provenance.py::test_what_cannot_be_true_cannot_be_made",
    ),
    Mutant(
        "old objects of kernels are never removed",
        "kernels/compile.py",
        "_STAMPS_KEPT = 4",
        "_STAMPS_KEPT = 40",
        f"{_KERNELS}::test_only_the_stamps_used_last_are_left",
    ),
    Mutant(
        "arrays of Python objects are read",
        "formats/arrays.py",
        "if dtype.hasobject:",
        "if dtype.hasobject and size < 0:",
        "tests/core/test_formats.py::test_an_npz_must_say_which_array_and_which_row_bytes",
    ),
]
