"""What every step is measured by: few keys, the same for all modes, agreed over the ranks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch.distributed as dist

from moeyard.arrays import FloatArray, IntArray
from moeyard.bounds import bound
from moeyard.provenance import Network, Provenance, data_of
from moeyard.runtime import Yard
from moeyard.runtime.agree.plans import Plan
from moeyard.runtime.agree.watcher import Flown, Mark, Queued
from moeyard.schedule import MESSAGE
from moeyard.timeline import Timeline
from moeyard.train.clocks import clock_offsets
from moeyard.train.device import device_zero, wait_for_device
from moeyard.train.parts import PARTS, divide, exchange_spans
from moeyard.train.wan import WanMeter

FORECAST = "forecast"  # what a yard calls waiting for a plan that is made beside the training


class StepLog:
    """What a yard did since the step began: the yard's watcher. Make it first, give it to the yard, then to a Meter.

    Planning is what lies between the counts and the plan: placement, assignment and schedule.
    """

    def __init__(self) -> None:
        self.flown: list[Flown] = []  # exchanges of rows
        self.behind: list[Flown] = []  # of experts and their gradients, behind the rest
        self.queued_: list[Queued] = []  # on a device, until `read`
        self.spans: list[tuple[str, float, float]] = []  # kind, begin, end; for the picture of a step
        self.plan_s = self.wait_s = 0.0
        self._agreed: float | None = None

    def agreed(self, kind: str, began: float, ended: float) -> None:
        if kind == FORECAST:
            self.plan_s += ended - began
            self.spans.append(("plan", began, ended))
            return
        self._agreed = ended
        self.wait_s += ended - began
        self.spans.append(("wait", began, ended))

    def planned(self, plan: Plan, began: float, ended: float) -> None:
        if self._agreed is not None:
            began, self._agreed = self._agreed, None
        self.plan_s += ended - began
        self.spans.append(("plan", began, ended))

    def exchanged(self, flown: Flown) -> None:
        (self.behind if flown.behind else self.flown).append(flown)

    def queued(self, queued: Queued) -> None:
        self.queued_.append(queued)

    def read(self, zero: Any, at: float) -> None:
        """The times of what was queued, when the device is done. zero: an event that was recorded when the clock said `at`."""
        for one in self.queued_:
            began, ended = (at + zero.elapsed_time(event) / 1e3 for event in (one.began, one.ended))
            marks = [Mark(*message, began, ended) for message in one.messages]
            self.flown.append(Flown(one.plan, one.backward, began, ended, marks))
        self.queued_.clear()

    def clear(self) -> None:
        self.flown.clear()
        self.behind.clear()
        self.queued_.clear()
        self.spans.clear()
        self.plan_s = self.wait_s = 0.0


class Meter:
    """Metrics of a yard that `log` watches. `begin()`, run the step, `end(...)`: the step's metrics, the same on every rank.

    exchange: from the last rank's arrival at an exchange of rows to the last rank's end, added up; gather: the same of experts'
    parameters and gradients, and the longest that a rank spent on those behind the training. wait: what a rank waits for
    the last to arrive, mean over the ranks. early: how long before the last rank the first arrives, added up over exchanges of rows; who is
    early sends, so an exchange may take less than its bound, but not less than the bound together with this. wan: see `WanMeter`. plan: placement, assignment and schedule of new traffic, slowest rank. parts:
    every moment of each rank's iteration, divided. Each figure goes out with where it comes from.
    """

    def __init__(
        self,
        yard: Yard,
        log: StepLog,
        row_bytes: int,
        network: Network,
        *,
        expert_bytes: int,
        emulated: bool = False,
    ) -> None:
        self.yard, self.log, self.row_bytes, self.network = yard, log, row_bytes, network
        self.provenance = origins(network, emulated, counted=yard.options.transport != "collective")
        if yard.cluster.datacenters > 1:
            self.provenance |= {
                "wan_bytes": Provenance.measured(network), "wan_copies": Provenance.measured(),
            }  # fmt: skip
        self.offsets = clock_offsets(yard)
        self._wan = WanMeter(yard, row_bytes, expert_bytes)
        self._began = 0.0
        self._zero: tuple[Any, float] | None = None  # an event, and the clock when it was recorded
        self._bounds: dict[int, float] = {}

    def begin(self) -> None:
        """All ranks together."""
        self._zero = None if self.yard.device.type == "cpu" else device_zero()
        self.yard.control.gather(np.zeros(1, np.int64))
        self._wan.begin()
        self.log.clear()
        self._began = time.monotonic()

    def since_begin(self) -> float:
        """Seconds since the step began on this rank."""
        return time.monotonic() - self._began

    def forget(self) -> None:
        """The step is repeated: only its second try counts, but for the iteration's own time."""
        self.log.clear()

    def end(self, loss_share: float, tokens: int, stop: bool = False) -> dict[str, Any]:
        """Metrics of the step just done. `stop`: true on all ranks if it is on any."""
        if self._zero is not None:
            wait_for_device()
            self.log.read(*self._zero)
        ended_at = time.monotonic()
        flown = self.foreground()
        hidden = sum(one.ended - one.began for one in self.log.behind)
        mine = [self._began, ended_at, self.log.plan_s, self.log.wait_s, hidden]
        mine += [t for one in flown for t in (one.began, one.ended)]
        offset = self.offsets[self.yard.rank]
        times = np.array(mine)
        times[:2] -= offset
        times[5:] -= offset
        # As whole nanoseconds; the loss keeps its bits.
        packed = np.concatenate([(times * 1e9).round(), [stop, tokens]]).astype(np.int64)
        packed = np.append(packed, np.float64(loss_share).view(np.int64))
        heard = self.yard.control.gather(packed)
        seconds = heard[:, :-3] / 1e9
        spans = seconds[:, 5:].reshape(len(heard), -1, 2)
        iteration = float(seconds[:, 1].max() - seconds[:, 0].max())
        arrived, ended = spans[:, :, 0].max(axis=0), spans[:, :, 1].max(axis=0)
        rows_X = np.array([one.plan.traffic.row_bytes == self.row_bytes for one in flown], np.bool_)
        exchange = float((ended - arrived)[rows_X].sum())
        wait = float((arrived - spans[:, :, 0]).mean(axis=0).sum() + seconds[:, 3].mean())
        parts = self._parts(seconds[:, :2], spans[self.yard.rank], arrived)
        least = sum(self._bound(one.plan) for one, rows in zip(flown, rows_X, strict=True) if rows)
        balance = self._balance()
        return {
            "loss": float(heard[:, -1].copy().view(np.float64).sum()),
            "seconds": iteration,
            "tokens_per_s": float(heard[:, -2].sum() / iteration),
            "overload": 1 / balance,
            "balancedness": balance,
            **self._across([one for one, rows in zip(flown, rows_X, strict=True) if rows]),
            "rows_per_rail": {way: rows.tolist() for way, rows in self.rows_per_rail().items()},
            "plan_s": float(seconds[:, 2].max()),
            "exchange_s": exchange,
            "gather_s": float((ended - arrived)[~rows_X].sum() + seconds[:, 4].max()),
            "wait_s": wait,
            "early_s": float((arrived - spans[:, :, 0].min(axis=0))[rows_X].sum()),
            "x_bound": exchange / least if least else 1.0,
            **self._wan.end(flown, self.log.behind),
            "parts_s": {part: float(column.mean()) for part, column in parts.items()},
            "parts_R": {part: column.tolist() for part, column in parts.items()},
            "provenance": data_of(self.provenance),
            "stop": bool(heard[:, -3].any()),
        }

    def _across(self, flown: list[Flown]) -> dict[str, int]:
        """Rows between nodes, and what they would be if each went for itself."""
        node = self.yard.cluster.node_R
        apart = node[:, None] != node
        return {
            "rows_sent": sum(int(one.plan.traffic.rows[apart].sum()) for one in flown),
            "rows_plain": sum(int(one.plan.plain_RR[apart].sum()) for one in flown),
        }

    def foreground(self) -> list[Flown]:
        """The exchanges that training waited for, in one order on all ranks: those that overlap end in any order, but those of one plan
        and direction run one after another."""
        return sorted(self.log.flown, key=lambda one: (one.plan.digest, one.backward, one.began))

    def all_exchanges(self) -> list[Flown]:
        """The same and those behind the training, whose order is the same on all ranks, as they run one after another."""
        return [*self.foreground(), *self.log.behind]

    def _balance(self) -> float:
        """Mean over max rows computed by a rank, mean over the layers."""
        rows = [one for one in self.log.flown if one.plan.traffic.row_bytes == self.row_bytes]
        sent = sorted((one for one in rows if not one.backward), key=lambda one: one.began)
        loads = [one.plan.plain_RR.sum(axis=0) for one in sent if one.plan.plain_RR.any()]
        loads = loads[
            : max(1, len(loads) // 2)
        ]  # the forward's dispatches; the backward's way back comes after
        return float(np.mean([load.mean() / load.max() for load in loads])) if loads else 1.0

    def _parts(self, steps: FloatArray, own: FloatArray, arrived: FloatArray) -> dict[str, FloatArray]:
        """Part -> seconds by rank; each rank's add up to the iteration. steps: [rank, begin and end] of the step."""
        begin, end = float(steps[:, 0].max()), float(steps[:, 1].max())
        offset = float(self.offsets[self.yard.rank])
        spans = [(kind, a - offset, b - offset) for kind, a, b in self.log.spans]
        spans += exchange_spans(own, arrived)
        spans.append(("wait", float(steps[self.yard.rank, 1]), end))
        mine = divide(begin, end, spans)
        heard = self.yard.control.gather(np.array([round(mine[part] * 1e9) for part in PARTS], np.int64))
        return {part: heard[:, i] / 1e9 for i, part in enumerate(PARTS)}

    def _bound(self, plan: Plan) -> float:
        if plan.digest not in self._bounds:
            self._bounds[plan.digest] = bound(self.yard.cluster, plan.traffic)
            if len(self._bounds) > 1000:
                self._bounds.clear()
                return bound(self.yard.cluster, plan.traffic)
        return self._bounds[plan.digest]

    def rows_per_rail(self) -> dict[str, IntArray]:
        """Rows (of the model's row size) that left and entered each nic in this step: [node, rail].

        From the messages that the ranks sent; gloo's own all-to-all tells none, and takes the rail of the lower of the
        two local ranks.
        """
        cluster = self.yard.cluster
        shape = (cluster.nodes, cluster.nics_per_node)
        out, into = np.zeros(shape), np.zeros(shape)
        if self.yard.options.transport == "collective":
            for one in self.log.flown:
                moved: Any = one.plan.traffic.rows * (one.plan.traffic.row_bytes / self.row_bytes)
                _add_gloo(cluster, moved.T if one.backward else moved, out, into)
            return {"out": out.round().astype(np.int64), "in": into.round().astype(np.int64)}
        node = self.yard.rank // cluster.ranks_per_node
        for one in (*self.log.flown, *self.log.behind):
            weight = one.plan.traffic.row_bytes / self.row_bytes
            for _, peer, rows, sent, _, _ in one.marks:
                rail = (self.yard.channels.send_to if sent else self.yard.channels.receive_from)[peer].rail
                if rail is not None and rail >= 0:
                    (out if sent else into)[node, rail] += rows * weight
        mine = np.concatenate([out.ravel(), into.ravel()]).round().astype(np.int64)
        total = self.yard.control.gather(mine).sum(axis=0).reshape(2, *shape)
        return {"out": total[0], "in": total[1]}

    # pictures

    def timeline(self) -> tuple[Timeline, Any] | None:
        """(measured course, schedule) of the step's largest dispatch, on rank 0; every rank calls this. None on a device, where
        only whole exchanges have times."""
        if self.yard.device.type != "cpu":
            return None
        flown = self.foreground()
        sizes = [int(one.plan.traffic.rows.sum()) if one.marks or self.yard.size == 1 else 0 for one in flown]
        heard = self.yard.control.gather(np.array(sizes, np.int64)).max(axis=0)
        if not heard.any():
            return None
        one = flown[int(np.argmax(heard))]
        marks = self._gather_marks(one)
        if self.yard.rank:
            return None
        found = measured_timeline(self.yard.cluster, one, marks, self.offsets, self.network)
        return found, one.plan.schedule

    def late(self, accelerator: Any) -> dict[str, float] | None:
        """Share of the emulated accelerators' waits that the real maths took longer than: of all ranks, and of the
        worst and which that is. Every rank calls this."""
        if accelerator is None:
            return None
        counts = self.yard.control.gather(np.array([accelerator.late, accelerator.waits], np.int64))
        share = counts[:, 0] / np.maximum(1, counts[:, 1])
        worst = int(np.argmax(share))
        return {"mean": float(share.mean()), "worst": float(share[worst]), "worst_rank": worst}

    def step_spans(self, accelerator: Any) -> list[list[tuple[str, float, float]]]:
        """By rank: (kind, begin, end) of what the last step did, in seconds since it began; every rank calls this."""
        zero = float(self.yard.control.gather(np.array([int(self._began * 1e9)], np.int64)).max()) / 1e9
        offset = zero + float(self.offsets[self.yard.rank])
        spans = list(self.log.spans)
        if accelerator is not None:
            spans += [span for span in accelerator.spans if span[1] >= self._began]
        spans += [("gather", one.began, one.ended) for one in self.log.behind]
        for one in self.log.flown:
            kind = "exchange" if one.plan.traffic.row_bytes == self.row_bytes else "gather"
            spans.append((kind, one.began, one.ended))
        mine = [
            (kind, begin - offset, end - offset) for kind, begin, end in sorted(spans, key=lambda s: s[1])
        ]
        return self._gather(mine)

    def _gather_marks(self, one: Flown) -> list[list[Mark]]:
        return self._gather(one.marks)

    def _gather(self, mine: Any) -> list[Any]:
        """What every rank has."""
        heard: list[Any] = [None] * self.yard.size
        floor, group = self.yard.floor("measure"), self.yard.control.group
        floor.watched(lambda: dist.all_gather_object(heard, mine, group=group))
        return heard


def origins(network: Network, emulated: bool, *, counted: bool) -> dict[str, Provenance]:
    """Where each figure of a mode comes from. `counted`: every message tells its rail; gloo's own all-to-all tells none."""
    crossed, paced = Provenance.measured(network), Provenance.measured(network, emulated=emulated)
    return {
        **dict.fromkeys(
            ("iteration_s", "seconds", "tokens_per_s", "wait_s", "early_s", "parts_s", "spans"), paced
        ),
        **dict.fromkeys(("exchange_s", "gather_s", "x_bound", "events"), crossed),
        **dict.fromkeys(
            ("loss", "balancedness", "overload", "plan_s", "rows_sent", "rows_plain"), Provenance.measured()
        ),
        "rows_per_rail": crossed if counted else Provenance.modelled(network),
    }


def _add_gloo(cluster: Any, rows_RR: FloatArray, out: FloatArray, into: FloatArray) -> None:
    nic = np.array([cluster.nic(r)[1] for r in range(cluster.num_ranks)])
    node = cluster.node_R
    src, dst = np.nonzero(rows_RR * (node[:, None] != node[None, :]))
    rail = np.minimum(nic[src], nic[dst])
    np.add.at(out, (node[src], rail), rows_RR[src, dst])
    np.add.at(into, (node[dst], rail), rows_RR[src, dst])


def measured_timeline(
    cluster: Any, one: Flown, marks_R: list[list[Mark]], offsets: FloatArray, network: Network
) -> Timeline:
    """A message starts when both its ends have posted it, and ends when its receiver has it. Zero: the first to begin."""
    posted: dict[tuple[int, int, int], float] = {}
    found: dict[tuple[int, int, int], tuple[float, float, int]] = {}
    for rank, marks in enumerate(marks_R):
        for stage, peer, _, sent, at, _ in marks:
            if sent:
                posted[stage, rank, peer] = at - offsets[rank]
    for rank, marks in enumerate(marks_R):
        for stage, peer, rows, sent, at, done in marks:
            if not sent:
                key = (stage, peer, rank)
                found[key] = (max(at - offsets[rank], posted[key]), done - offsets[rank], rows)
    keys = sorted(found)
    zero = min((found[key][0] for key in keys), default=0.0)
    start = np.array([found[key][0] - zero for key in keys])
    end = np.array([found[key][1] - zero for key in keys])
    table = np.array([(*key, found[key][2]) for key in keys], dtype=np.int64).reshape(len(keys), 4)
    messages = np.ascontiguousarray(table).view(MESSAGE).reshape(len(keys)).view(np.recarray)
    return Timeline(
        cluster=cluster, traffic=one.plan.traffic, scheduler=one.plan.schedule.scheduler, messages=messages,
        start_M=start, first_M=start, end_M=end, cause_M=np.full(len(keys), -1, np.int64),
        provenance=Provenance.measured(network),
    )  # fmt: skip
