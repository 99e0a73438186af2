"""Defects of homes that move beside what is bound to experts by their place, and of calls that end."""

from __future__ import annotations

from bench.mutants.mutant import Mutant

_MOVED, _REPLAY = "tests/runtime/test_moved.py", "tests/core/test_replay.py"
_NUMBERS = f"{_MOVED}::test_the_numbers_are_those_of_experts_that_stay"

MOVING = [
    Mutant(
        "groups of a mesh decide by counts of their own",
        "runtime/layers/rehome.py",
        "    if yard.data_group is not None:",
        "    if False:",
        f"{_NUMBERS}[by_themselves]",
    ),
    Mutant(
        "a copy is another family, and nobody is told that it stays behind",
        "runtime/layers/share.py",
        "return Site(self.yard, self.family)",
        "return Site(self.yard)",
        f"{_MOVED}::test_a_copy_that_stays_behind_is_told_of_and_no_other",
    ),
    Mutant(
        "copies do not move along",
        "runtime/layers/rehome.py",
        "homes, optimizer, copies=copies)",
        "homes, optimizer)",
        f"{_NUMBERS}[together]",
    ),
    Mutant(
        "an optimizer that is given twice moves its state twice",
        "runtime/layers/move.py",
        "return list({id(state): one for state, one in zip(states, given, strict=True)}.values())",
        "return given",
        f"{_NUMBERS}[two_optimizers]",
    ),
    Mutant(
        "a layer that nobody speaks of may share experts that move",
        "runtime/layers/move.py",
        "    if any((done.get(id(one), home_E) != home_E).any() for one in own.values()):",
        "    if False:",
        f"{_MOVED}::test_layers_that_share_experts_cannot_move_apart",
    ),
    Mutant(
        "layers that share experts choose homes one by one",
        "runtime/layers/rehome.py",
        "marks = [id(one) for _, one in stack_parameters(module)]",
        "marks = [id(module)]",
        f"{_NUMBERS}[shared]",
    ),
    Mutant(
        "the node that adds up a gradient keeps the old shape",
        "runtime/layers/move.py",
        "if data.shape != parameter.shape:",
        "if False:",
        f"{_NUMBERS}[kept_loss]",
    ),
    Mutant(
        "the states of two optimizers are taken for one another",
        "runtime/layers/move.py",
        "for parameter in one.parameters for stepper in given if not one.copy)",
        "for parameter in one.parameters for stepper in given[::-1] if not one.copy)",
        f"{_NUMBERS}[two_optimizers]",
    ),
    Mutant(
        "an optimizer that lacks the experts is taken",
        "runtime/layers/move.py",
        "    if steppers:\n        _refuse_unstepped",
        "    if False:\n        _refuse_unstepped",
        f"{_MOVED}::test_an_optimizer_that_does_not_have_the_experts_is_refused",
    ),
    Mutant(
        "copies that stay behind are not told of",
        "runtime/layers/move.py",
        "        _warn_of_copies([model, *copies], orders)",
        "        pass",
        f"{_MOVED}::test_a_copy_that_stays_behind_is_told_of_and_no_other",
    ),
    Mutant(
        "a state dict of other homes is loaded",
        "runtime/layers/share.py",
        "if there is not None and there != here and any(key.startswith(stacks) for key in state):",
        "if False:",
        f"{_MOVED}::test_a_state_dict_of_other_homes_is_refused_and_of_the_same_is_loaded",
    ),
    Mutant(
        "a model with experts is an extra, as rank 0 has it",
        "runtime/state/training_state.py",
        "if isinstance(one, nn.Module) and any(expert_modules(one)):",
        "if False:",
        f"{_MOVED}::test_a_model_with_experts_is_no_extra_of_a_checkpoint",
    ),
    Mutant(
        "what is read again is differentiated as a constant",
        "runtime/block/linear.py",
        "refuse_second()  # what is read again is no part of a graph",
        "pass",
        f"{_MOVED}::test_matrices_that_are_read_again_have_no_second_derivative",
    ),
    Mutant(
        "a rank that overflows leaves out the step alone",
        "runtime/layers/gradients.py",
        "one.fill_(float(anywhere))",
        "pass",
        f"{_MOVED}::test_a_rank_that_overflows_makes_all_leave_out_the_step",
    ),
    Mutant(
        "experts of another yard are summed over this one's groups",
        "runtime/layers/share.py",
        "if ranks != yard.ranks:",
        "if False:",
        f"{_MOVED}::test_experts_of_another_yard_are_refused",
    ),
    Mutant(
        "an interrupt is raised wherever it comes",
        "workers.py",
        "name.startswith(_LOCKS):",
        "name.startswith(()):",
        f"{_REPLAY}::test_ctrl_c_leaves_no_lock_half_taken",
    ),
    Mutant(
        "joblib's thread is heard where its queue is closed",
        "workers.py",
        "ended = closed or said.thread in interrupts.ended",
        "ended = said.thread in interrupts.ended",
        f"{_REPLAY}::test_the_thread_that_hands_out_work_is_hushed_where_its_queue_is_closed_before_the_interrupt_is_here[error0-False]",
    ),
    Mutant(
        "joblib's thread is heard after an interrupt",
        "workers.py",
        "ended = closed or said.thread in interrupts.ended",
        "ended = closed",
        f"{_REPLAY}::test_after_an_interrupt_joblibs_thread_is_not_heard_whatever_it_misses",
    ),
]
