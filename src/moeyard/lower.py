"""Schedule -> Program."""

from __future__ import annotations

from moeyard.arrays import IntArray, all_writable, is_whole
from moeyard.errors import InvalidSchedule
from moeyard.forms.parts import Lowered
from moeyard.kernels.program.lower import lower_back, lower_tables
from moeyard.program import Program
from moeyard.schedule import Form, Schedule


def lower(schedule: Schedule, rank: int) -> Program:
    """The part of one rank. Builds nothing for the others."""
    if not is_whole(rank) or not 0 <= rank < schedule.traffic.num_ranks:
        raise InvalidSchedule(f"rank {rank!r} is not one of 0..{schedule.traffic.num_ranks - 1}")
    form, stages, rows = schedule.form, schedule.stages, schedule.traffic.rows
    waits = stages.after_ptr, stages.after
    if schedule.backward:
        lowered = lower_back(*_tables(form, rank), rank, rows, *waits)
    elif isinstance(form, Lowered):
        lowered = form.lowered(rank)
    else:
        lowered = lower_tables(*_tables(form, rank), rank, rows, len(stages), *waits)
    own, after_ptr, after, message_ptr, peer, send, rows, run_ptr, space, offset, length, sizes = lowered
    input_rows, relay_rows, output_rows, keep_input, keep_output, lost = sizes.tolist()
    if lost >= 0:
        stage, _, dst, origin, target, start, count = schedule.sends(rank)[lost].tolist()
        raise InvalidSchedule(
            f"stage {stage}, rank {rank} -> {dst}: sends rows [{start}, {start + count}) of {origin} -> {target}, "
            f"but rank {rank} never receives all of them"
        )
    return Program(
        rank=rank,
        input_rows=input_rows,
        relay_rows=relay_rows,
        output_rows=output_rows,
        stage_S=own,
        scale_out_S=stages.scale_out[own],
        after_ptr=after_ptr,
        after=after,
        message_ptr=message_ptr,
        peer=peer,
        send=send,
        rows=rows,
        run_ptr=run_ptr,
        run_space=space,
        run_offset=offset,
        run_rows=length,
        keep_input=keep_input,
        keep_output=keep_output,
        keep_rows=int(schedule.traffic.rows[rank, rank]),
    )


def _tables(form: Form, rank: int) -> list[IntArray]:
    """What the rank sends and receives on the way there."""
    return (
        form.tables(rank)
        if isinstance(form, Lowered)
        else all_writable(form.sends(rank), form.receives(rank))
    )
