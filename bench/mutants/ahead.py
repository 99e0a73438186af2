"""Defects of what runs a layer ahead, behind the rest, or in chunks."""

from __future__ import annotations

from bench.mutants.mutant import Mutant

_AHEAD = "tests/runtime/test_ahead.py"
_WATCH = "tests/runtime/test_watch.py"

AHEAD = [
    Mutant(
        "one rank alone calls a gather off",
        "runtime/layers/routes.py",
        "int(np.bitwise_or.reduce(values[:, counted]))",
        "int(values[yard.rank, counted])",
        f"{_AHEAD}::test_a_parameter_that_changes_between_two_layers_calls_the_gather_off",
    ),
    Mutant(
        "a gather is used though its parameters have changed",
        "runtime/layers/ahead.py",
        "None if self._begun is None or told & STALE else self._begun.ahead",
        "None if self._begun is None else self._begun.ahead",
        f"{_AHEAD}::test_a_parameter_that_changes_between_two_layers_calls_the_gather_off",
    ),
    Mutant(
        "plans made beside the calls are not compared",
        "runtime/layers/ahead.py",
        "return told, small_digest(*digests) if digests else 0",
        "return told, 0",
        f"{_AHEAD}::test_a_rank_that_plans_otherwise_is_named",
    ),
    Mutant(
        "the next layer's gather takes the memory of this one's",
        "runtime/transport/buffers.py",
        'f"slot {turn % 2}"',
        '"slot"',
        f"{_AHEAD}::test_training_is_that_of_one_process[two slots]",
    ),
    Mutant(
        "a sum of gradients stays where ways meet",
        "runtime/layers/replicas.py",
        "columns[more] = total.index_select(0, place).flatten(1).to(dtype)",
        "columns[more] = grad.index_select(0, self._index(tier.arrive[added])).flatten(1).to(dtype)",
        f"{_AHEAD}::test_training_is_that_of_one_process[resident]",
    ),
    Mutant(
        "a recomputed forward is planned anew",
        "runtime/layers/ahead.py",
        "self.again = recomputing()",
        "self.again = False",
        f"{_AHEAD}::test_training_is_that_of_one_process[two slots, accumulated, checkpointed]",
    ),
    Mutant(
        "nothing is begun ahead",
        "runtime/layers/ahead.py",
        "if self._next is not None:",
        "if False:",
        f"{_AHEAD}::test_training_is_that_of_one_process[resident]",
    ),
    Mutant(
        "a yard is closed before this rank has done its part of what others have begun",
        "runtime/yard.py",
        "        if self.guard.fault is None and sys.exc_info()[0] is None:",
        "        if False:",
        f"{_AHEAD}::test_who_leaves_a_yard_does_its_part_of_what_others_have_begun",
    ),
    Mutant(
        "rows hold up what runs behind them for ever",
        "runtime/transport/light.py",
        "number <= self._wanted, left)",
        "number <= self._wanted)",
        "tests/runtime/test_light.py::test_rows_that_never_come_hold_nothing_up_for_long",
    ),
    Mutant(
        "a save behind the caller ends where its yard is left",
        "runtime/state/checkpoint.py",
        "    floor.stay_open_for(future)\n",
        "",
        f"{_AHEAD}::test_a_save_under_way_is_finished_before_the_yard_closes",
    ),
    Mutant(
        "a job behind the training that fails while nobody waits for it is forgotten",
        "runtime/transport/behind.py",
        "            if guard.in_peace:\n",
        "            if False:\n",
        f"{_WATCH}::test_who_fails_behind_the_training_is_to_blame_though_nobody_waited_there",
    ),
    Mutant(
        "an error that all ranks raise together, every part done, is taken for one rank's own",
        "runtime/transport/behind.py",
        "        except ExchangeError:\n            raise\n",
        "",
        f"{_WATCH}::test_who_fails_behind_the_training_is_to_blame_though_nobody_waited_there",
    ),
    Mutant(
        "a yard is open on one rank while another still connects",
        "runtime/yard.py",
        "        self.settle()  # nobody leaves",
        "        # nobody leaves",
        "tests/runtime/test_yard.py::test_detection_meshes_closing_rails_and_measuring",
    ),
]
