"""Defects of what must not be old or another's: replicas at odd moments, checkpoints into another optimizer, words about a run."""

from __future__ import annotations

from bench.mutants.mutant import Mutant

_FRESH, _SAVES, _MODES = (
    f"tests/{name}.py" for name in ("runtime/test_fresh", "runtime/test_saves", "train/test_modes")
)
_NUMBERS = f"{_FRESH}::test_the_numbers_are_those_without_replicas"

FRESHNESS = [
    Mutant(
        "a gather begun for a frozen layer serves one that is trained",
        "runtime/layers/fresh.py",
        "return not same or [one.requires_grad for one in stacks] != self._trained",
        "return not same",
        f"{_NUMBERS}[unfrozen]",
    ),
    Mutant(
        "what was begun is used whatever was written since",
        "runtime/layers/ahead.py",
        "return hosted.seen.replaced(stacks) or hosted.changed()",
        "return hosted.seen.replaced(stacks)",
        f"{_NUMBERS}[taught]",
    ),
    Mutant(
        "torch's own array of parameters keeps FSDP2 from freeing them",
        "runtime/codec/message.py",
        "checksum(np.ctypeslib.as_array(there))",
        "checksum(words.numpy().view(np.uint32))",
        f"{_NUMBERS}[whole_by_fsdp]",
    ),
    Mutant(
        "what is marked is what was to be read, not what was",
        "runtime/layers/fresh.py",
        "self._marks: list[Mark] = []",
        "self._marks, self.took = _marks(stacks, dtype), lambda copies: None",
        f"{_NUMBERS}[read_meanwhile]",
    ),
    Mutant(
        "a codec reads its experts while they are written",
        "runtime/layers/replicas.py",
        "source = [one.clone() for one in source]",
        "source = list(source)",
        f"{_NUMBERS}[sent_meanwhile, coded]",
    ),
    Mutant(
        "the checksum is linear in the words, so that all of them doubled leave it alone",
        "kernels/codec/blocks.py",
        "total += mixed(pair, i)",
        "total += (pair & np.uint64(0xFFFFFFFF)) * np.uint64(4 * i + 1) + (pair >> np.uint64(32)) * np.uint64(4 * i + 3)",
        f"{_FRESH}::test_the_number_of_a_diagonal_shows_where_it_lies[16-kind1]",
    ),
    Mutant(
        "on a device a change of all signs leaves the mark of float64 alone",
        "runtime/layers/fresh.py",
        "_LANES = 127",
        "_LANES = 128",
        f"{_FRESH}::test_the_mark_of_parameters_shows_every_write",
    ),
    Mutant(
        "on a device experts that change places leave their mark alone",
        "runtime/layers/fresh.py",
        "return torch.cat([words.sum(0), words.sum(1), left])",
        "return torch.cat([words.sum(0), left])",
        f"{_FRESH}::test_the_mark_of_parameters_shows_every_write",
    ),
    Mutant(
        "a backward pass takes today's weights for those of its forward",
        "runtime/layers/replicas.py",
        "if self._gather is not None and self.changed():",
        "if False:",
        f"{_FRESH}::test_gradients_of_other_weights_than_the_forwards_are_refused[changed]",
    ),
    Mutant(
        "receivers keep what another forward brought them",
        "runtime/layers/coded.py",
        "and not self._strayed(current, master)):",
        "):",
        f"{_NUMBERS}[evaluated_between, coded]",
    ),
    Mutant(
        "a home decides alone whether its receivers are told anew",
        "runtime/layers/coded.py",
        'strayed = bool(self.yard.agree("masters", [int(here)]).any())',
        "strayed = here",
        f"{_NUMBERS}[evaluated_between_again, coded]",
    ),
    Mutant(
        "a checkpoint of another kind of optimizer is taken",
        "runtime/state/training_state.py",
        "        if saved[KIND] != name:\n",
        "        if False:\n",
        f"{_SAVES}::test_another_kind_of_optimizer_is_refused_before_anything_is_touched",
    ),
    Mutant(
        "the kind of an optimizer is looked at when the model is already overwritten",
        "runtime/state/checkpoint.py",
        "            parts.check_groups(model, optimizer, stored.value(parts.GROUPS))\n",
        "            pass\n",
        f"{_SAVES}::test_another_kind_of_optimizer_is_refused_before_anything_is_touched",
    ),
    Mutant(
        "a checkpoint that tells no kind is taken by any",
        "runtime/state/training_state.py",
        "    if lacking and odd:\n",
        "    if False:\n",
        f"{_SAVES}::test_another_kind_of_optimizer_is_refused_before_anything_is_touched",
    ),
    Mutant(
        "any option makes another kind of an optimizer",
        "runtime/state/training_state.py",
        "(saved.keys() & known) - own",
        "saved.keys() - own",
        f"{_SAVES}::test_options_beside_the_kinds_own_are_no_other_kind",
    ),
    Mutant(
        "who wraps an optimizer is a kind",
        "runtime/state/training_state.py",
        "        optimizer = inner\n",
        "        break\n",
        f"{_SAVES}::test_a_wrapped_optimizer_is_of_the_kind_that_it_wraps",
    ),
    Mutant(
        "a forked child waits for a save that nobody writes",
        "runtime/state/checkpoint.py",
        "os.register_at_fork(after_in_child=_under_way.clear)",
        "pass",
        f"{_SAVES}::test_a_child_that_is_forked_during_a_save_ends",
    ),
    Mutant(
        "a gather is begun ahead for what FSDP2 shards",
        "runtime/layers/fresh.py",
        "    return known[1]\n",
        "    return False\n",
        f"{_NUMBERS}[whole_by_fsdp]",
    ),
    Mutant(
        "a link among old checkpoints is removed as if it were a folder",
        "runtime/state/folders.py",
        "        if path.is_symlink():\n",
        "        if False:\n",
        f"{_SAVES}::test_an_old_one_that_cannot_be_removed_is_no_reason_to_call_the_new_one_unsaved",
    ),
    Mutant(
        "a failed save that nobody waits for is forgotten",
        "runtime/state/checkpoint.py",
        "        if not self._told and",
        "        if False and",
        f"{_SAVES}::test_a_failed_save_that_nobody_waits_for_is_told_of_by_the_next",
    ),
    Mutant(
        "a step that is no whole number is cut off",
        "runtime/state/checkpoint.py",
        "        found = operator.index(step)\n",
        "        found = int(step)\n",
        f"{_SAVES}::test_a_step_is_a_whole_number",
    ),
    Mutant(
        "losses are compared with the first mode alone",
        "report/load.py",
        "max((max(losses) - min(losses) for losses in several), default=0.0)",
        "max((abs(one - losses[0]) for losses in several for one in losses), default=0.0)",
        f"{_MODES}::test_the_gap_of_losses_is_between_any_two_modes",
    ),
    Mutant(
        "a loss that is no number differs by nothing",
        "report/load.py",
        "        return math.nan\n",
        "        return 0.0\n",
        f"{_MODES}::test_a_loss_that_is_no_number_is_not_the_same_loss",
    ),
    Mutant(
        "slower exchanges are called faster",
        "report/run.py",
        '"faster" if x >= y else "slower"',
        '"faster"',
        f"{_MODES}::test_slower_exchanges_are_not_called_faster",
    ),
]
