"""Schedule -> Program, and the reference executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeyard.arrays import frozen
from moeyard.errors import InvalidSchedule, InvalidTraffic
from moeyard.forms.lanes import Lanes
from moeyard.kernels.program.lower import lower_tables
from moeyard.program import INPUT, OUTPUT, RELAY, Program
from moeyard.schedule import Schedule


def lower(schedule: Schedule, rank: int) -> Program:
    """The part of one rank. Builds nothing for the others."""
    if not 0 <= rank < schedule.traffic.num_ranks:
        raise InvalidSchedule(f"rank {rank} is not one of 0..{schedule.traffic.num_ranks - 1}")
    stages = schedule.stages
    if (
        isinstance(schedule.form, Lanes) and not schedule.backward
    ):  # the same in one call: this is on the critical path
        lowered = schedule.form.lowered(rank)
    else:
        tables = schedule.sends(rank), schedule.receives(rank)
        lowered = lower_tables(
            *tables, rank, schedule.traffic.rows, len(stages), stages.after_ptr, stages.after
        )
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
        stage_S=frozen(own),
        scale_out_S=frozen(stages.scale_out[own]),
        after_ptr=frozen(after_ptr),
        after=frozen(after),
        message_ptr=frozen(message_ptr),
        peer=frozen(peer),
        send=frozen(send),
        rows=frozen(rows),
        run_ptr=frozen(run_ptr),
        run_space=frozen(space),
        run_offset=frozen(offset),
        run_rows=frozen(length),
        keep_input=keep_input,
        keep_output=keep_output,
        keep_rows=int(schedule.traffic.rows[rank, rank]),
    )


def run_local(schedule: Schedule, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Every rank's program in one process, stage by stage: `outputs[r]` is what rank r ends up with.

    `inputs[r]` holds rank r's rows ordered by target; `outputs[r]` its received rows ordered by origin.
    """
    programs = [lower(schedule, rank) for rank in range(schedule.traffic.num_ranks)]
    if len(inputs) != len(programs):
        raise InvalidTraffic(f"{len(inputs)} inputs for {len(programs)} ranks; give one array per rank")
    spaces: list[dict[int, NDArray[Any]]] = []
    for program, rows in zip(programs, inputs, strict=True):
        if len(rows) != program.input_rows:
            raise InvalidTraffic(
                f"inputs[{program.rank}] has {len(rows)} rows, but the traffic sends {program.input_rows}"
            )
        relay, output = (
            np.empty((n, *rows.shape[1:]), rows.dtype) for n in (program.relay_rows, program.output_rows)
        )
        kept = slice(program.keep_input, program.keep_input + program.keep_rows)
        output[program.keep_output : program.keep_output + program.keep_rows] = rows[kept]
        spaces.append({INPUT: rows, RELAY: relay, OUTPUT: output})

    def run(rank: int, r: int) -> NDArray[Any]:
        program, offset = programs[rank], programs[rank].run_offset[r]
        return spaces[rank][int(program.run_space[r])][offset : offset + program.run_rows[r]]

    wire: dict[tuple[int, int, int], list[NDArray[Any]]] = {}
    todo = [
        (int(program.stage_S[s]), not program.send[m], program.rank, m)
        for program in programs
        for s in range(program.num_stages)
        for m in range(program.message_ptr[s], program.message_ptr[s + 1])
    ]
    for stage, receive, rank, m in sorted(todo):
        program, peer = programs[rank], int(programs[rank].peer[m])
        runs = range(program.run_ptr[m], program.run_ptr[m + 1])
        if not receive:
            wire[stage, rank, peer] = [run(rank, r).copy() for r in runs]
            continue
        rows = np.concatenate(wire.pop((stage, peer, rank)))
        if len(rows) != program.rows[m]:
            raise InvalidSchedule(
                f"stage {stage}, rank {peer} -> {rank}: {len(rows)} rows sent, {program.rows[m]} expected"
            )
        at = 0
        for r in runs:
            run(rank, r)[:] = rows[at : at + program.run_rows[r]]
            at += program.run_rows[r]
    if wire:
        stage, src, dst = min(wire)
        raise InvalidSchedule(f"stage {stage}, rank {src} -> {dst}: sent but never received")
    return [space[OUTPUT] for space in spaces]
