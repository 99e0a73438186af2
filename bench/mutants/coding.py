"""Defects of codecs."""

from __future__ import annotations

from bench.mutants.mutant import Mutant

_KERNELS, _RUNTIME = "tests/core/test_codec_kernels.py", "tests/runtime/test_codec.py"

CODING = [
    Mutant(
        "a codec's sender forgets what it sent",
        "runtime/codec/copies.py",
        "encode(self.codec, master.float().contiguous(), self.held, words)",
        "encode(self.codec, master.float().contiguous(), self.held.clone(), words)",
        f"{_RUNTIME}::test_the_study_trains_with_what_the_runtime_decodes[trial0]",
    ),
    Mutant(
        "a message of another version is taken",
        "runtime/codec/message.py",
        "int(head[0]) != version or ",
        "",
        f"{_RUNTIME}::test_a_message_that_is_not_what_it_should_be_is_seen",
    ),
    Mutant(
        "a message's checksum is not looked at",
        "runtime/codec/message.py",
        " or checksum_of(plain) != said",
        "",
        f"{_RUNTIME}::test_a_message_that_is_not_what_it_should_be_is_seen",
    ),
    Mutant(
        "what is picked has the wrong sign",
        "kernels/codec/pick.py",
        "np.uint32(n) if best[g] < 0 else",
        "np.uint32(n) if best[g] > 0 else",
        f"{_KERNELS}::test_a_message_is_the_slow_one[31-pick-8]",
    ),
    Mutant(
        "a block that is not full has too small a scale",
        "kernels/codec/bits.py",
        "half = rounded(_negative(master, held, at, planes) / count)",
        "half = rounded(_negative(master, held, at, planes) / BLOCK)",
        f"{_KERNELS}::test_a_message_is_the_slow_one[31-bits-1]",
    ),
    Mutant(
        "a group of changes loses its highest plane",
        "kernels/codec/changes.py",
        "counts[group] = many",
        "counts[group] = max(many - 1, 0)",
        f"{_KERNELS}::test_changes_give_back_every_bit[40-255]",
    ),
    Mutant(
        "a new receiver gets a difference",
        "runtime/layers/coded.py",
        "return link is not None and link.home == home and holders <= link.holders",
        "return link is not None and link.home == home",
        f"{_RUNTIME}::test_lossy_codecs_train_and_receivers_are_never_stale",
    ),
    Mutant(
        "masters that did not change move their receivers",
        "runtime/layers/coded.py",
        "same = not self.codec.exact and self.chain.seen.get(expert) == bits",
        "same = False",
        f"{_RUNTIME}::test_the_same_parameters_are_held_as_the_same_bits",
    ),
    Mutant(
        "a receiver keeps a wrong message to itself",
        "runtime/layers/coded.py",
        "            flags[expert] |= kind == 0\n",
        "",
        f"{_RUNTIME}::test_a_wrong_message_is_followed_by_an_anchor[a bit]",
    ),
    Mutant(
        "a codec's receivers stay where they are when masters are loaded",
        "runtime/state/checkpoint.py",
        "    yard.workspace.loads += 1",
        "    yard.workspace.loads += 0",
        f"{_RUNTIME}::test_going_back_to_a_checkpoint_in_a_living_yard",
    ),
    Mutant(
        "a codec's home does not see that a value is no number",
        "runtime/codec/copies.py",
        "return bool(far) or not (self.finite and _finite(master))",
        "return bool(far)",
        f"{_RUNTIME}::test_a_value_that_is_no_number_asks_for_an_anchor_until_it_is_gone[nan-bits:1]",
    ),
    Mutant(
        "a codec's home forgets that it sent what is no number",
        "runtime/codec/copies.py",
        "not (self.finite and _finite(master))",
        "not _finite(master)",
        f"{_RUNTIME}::test_a_value_that_is_no_number_asks_for_an_anchor_until_it_is_gone[nan-bits:1]",
    ),
    Mutant(
        "nobody looks whether an anchor is what was signed",
        "runtime/layers/coded.py",
        "            flags[expert] |= not signed(row)\n",
        "",
        f"{_RUNTIME}::test_a_damaged_anchor_is_sent_again_and_then_an_error",
    ),
    Mutant(
        "a codec's copies take no memory",
        "runtime/transport/memory.py",
        "return self.replicas + self.gradients + self.copies",
        "return self.replicas + self.gradients",
        f"{_RUNTIME}::test_a_yard_says_what_a_codecs_copies_take",
    ),
    Mutant(
        "planners count whole experts where a codec carries them",
        "runtime/layers/ahead.py",
        "model, newest = options.costed,",
        "model, newest = options.model,",
        f"{_RUNTIME}::test_a_yard_plans_for_what_its_codec_sends",
    ),
    Mutant(
        "a short message counts for layers with longer ones",
        "runtime/codec/spec.py",
        "longest = max(",
        "longest = min(",
        f"{_RUNTIME}::test_plans_count_what_crosses",
    ),
    Mutant(
        "the ranks' word after a coded gather is free",
        "kernels/step/gather.py",
        "fastest(moves.forms[WAN_TIER], 0.0) + moves.coders[0] * coding",
        "moves.coders[0] * coding",
        "tests/core/test_cost.py::test_a_codec_shrinks_what_crosses_the_wan_and_costs_coding_and_a_word",
    ),
    Mutant(
        "a wan is judged as if it let nothing pass at once",
        "runtime/observe/refine.py",
        "self._far.append(rate / shown)",
        "self._far.append(rate)",
        "tests/runtime/test_refine.py::test_a_wan_is_judged_beside_what_it_shows_when_it_is_as_planned",
    ),
]
