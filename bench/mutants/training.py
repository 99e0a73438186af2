"""Defects of training runs, reports and what papers' tables are said to show."""

from __future__ import annotations

from bench.mutants.mutant import Mutant

_PARTS, _PAGE, _PAPERS = (
    "tests/train/test_train_parts.py",
    "tests/report/test_page.py",
    "tests/report/test_reproduce.py",
)

ONCE_REAL = [  # the first version had these
    Mutant(
        "a run goes on with other options",
        "train/resume.py",
        "        _check_same(folder / ASKED, asked)\n",
        "",
        f"{_PARTS}::test_a_resumed_run_is_asked_for_the_same",
    ),
    Mutant(
        "a finished mode vanishes from a resumed run",
        "train/resume.py",
        "for mode in options.modes if options.resume else ():",
        "for mode in ():",
        f"{_PARTS}::test_a_resumed_run_keeps_what_is_done",
    ),
    Mutant(
        "a report of no mode ends in an IndexError",
        "report/load.py",
        "if not modes:",
        "if modes is None:",
        f"{_PAGE}::test_a_run_without_a_step_is_one_line",
    ),
    Mutant(
        "every network is called shaped",
        "runtime/observe/network.py",
        'return Network.LOOPBACK if machines == 1 and (device == "cpu" or shared) else Network.CLUSTER',
        "return Network.SHAPED",
        f"{_PARTS}::test_the_network_is_what_it_is",
    ),
    Mutant(
        "a page says shaped of a network that was not",
        "report/run.py",
        'Network.LOOPBACK: "All ranks were on one machine and its network was not shaped: exchange times are those of its memory."',
        'Network.LOOPBACK: "Real bytes crossed a shaped network on one machine."',
        f"{_PAGE}::test_a_page_says_of_its_own_network_and_of_no_other",
    ),
    Mutant(
        "rows that nobody counted are called measured",
        "train/meter.py",
        "crossed if counted else Provenance.modelled(network)",
        "crossed",
        f"{_PARTS}::test_what_nobody_counted_is_modelled",
    ),
    Mutant(
        "parts of a step that overlap count twice",
        "train/parts.py",
        "        found[kind] += edges[i + 1] - edges[i]\n",
        "        for kind in [one for one in PARTS if open_at[one][i]] or [kind]:\n            found[kind] += edges[i + 1] - edges[i]\n",
        f"{_PARTS}::test_the_parts_of_a_rank_add_up_whatever_overlaps",
    ),
    Mutant(
        "late maths is told of the last mode alone",
        "train/job.py",
        "for mode, one in late.items()",
        "for mode, one in list(late.items())[-1:]",
        f"{_PARTS}::test_late_maths_is_said_of_which_rank_and_mode",
    ),
    Mutant(
        "a run that cannot start leaves a folder",
        "cli/train.py",
        "        _under_torchrun(options, json)\n        return\n",
        "        out.mkdir(parents=True, exist_ok=True)\n        _under_torchrun(options, json)\n        return\n",
        "tests/train/test_train.py::test_what_cannot_start_says_why_and_leaves_no_folder",
    ),
    Mutant(
        "without lab and torchrun it ends for another reason",
        "cli/train.py",
        'if "RANK" not in os.environ:',
        'if "RANK" in os.environ:',
        "tests/train/test_train.py::test_what_cannot_start_says_why_and_leaves_no_folder",
    ),
    Mutant(
        "the order is the paper's whatever it is",
        "reproduce/fast.py",
        "if theirs != own]",
        "if theirs is None]",
        f"{_PAPERS}::test_the_order_is_the_papers_only_if_it_is",
    ),
    Mutant(
        "the theorem holds whatever the data",
        "reproduce/rails.py",
        "elif found.receiver_rows <= found.senders:",
        "elif found.receiver_rows >= 0:",
        f"{_PAPERS}::test_the_theorem_is_tested_on_the_data",
    ),
]

TRAINING = [
    *ONCE_REAL,
    Mutant(
        "a new run goes on from an old one's checkpoints",
        "train/resume.py",
        "        _set_aside(folder / mode / CHECKPOINTS)\n",
        "",
        f"{_PARTS}::test_a_new_run_sets_old_checkpoints_aside_and_forgets_what_was_done",
    ),
    Mutant(
        "clocks of ranks are taken for one",
        "train/meter.py",
        "posted[stage, rank, peer] = at - offsets[rank]",
        "posted[stage, rank, peer] = at",
        f"{_PARTS}::test_a_message_is_measured_from_both_ends_on_one_clock",
    ),
    Mutant(
        "an expert's share goes to its neighbours",
        "train/skew.py",
        "np.repeat(rows / rows.sum() / parts, parts)",
        "np.tile(rows / rows.sum() / parts, parts)",
        f"{_PARTS}::test_the_share_of_an_expert_is_split_evenly",
    ),
    Mutant(
        "curves that part are said to lie on each other",
        "report/run.py",
        "if gap <= run.same_loss",
        "if gap >= 0",
        f"{_PAGE}::test_curves_that_part_are_said_to",
    ),
    Mutant(
        "a figure without a label is shown",
        "report/load.py",
        "if key not in self.provenance:",
        'if key not in self.provenance and key == "none":',
        f"{_PAGE}::test_a_figure_without_a_label_is_not_shown",
    ),
]
