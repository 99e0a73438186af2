"""Every process group of a yard. All ranks of the world make all groups, members or not, in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moeyard.cluster import Cluster
from moeyard.errors import InvalidCluster
from moeyard.runtime.faults.guard import longest_wait
from moeyard.runtime.faults.rails import common_rail
from moeyard.runtime.transport.channels import Channels, abort_groups, make_group, shared_gloo
from moeyard.runtime.transport.world import World, device_of


class Groups:
    """Made at a yard's start, and anew after a lost rail.

    control: gloo, of the expert-parallel group, for small values. channels: what carries rows. dense: of the ranks that share
    the dense parameters; dense_control: the same for small values, on CPU. data: of the ranks with the same experts, if any.
    whole: of the expert-parallel group, for torch's own all-to-all; ours, since after a fault it is aborted. unplanned: that is
    what carries the rows.
    """

    def __init__(self, world: World, unplanned: bool = False) -> None:
        self._world, self._wait, self._unplanned = world, longest_wait(world.timeout), unplanned
        families = list(world.families)
        control = {f: self._control_group(f) for f in families}
        self.control = control[world.ranks]
        self.channels = self._channels()
        self._behind: Channels | None = None
        self._own: list[Any] = [self.control]
        self.whole: Any = self.control
        if unplanned or world.backend != "gloo":
            self.whole = {f: make_group(f, world.backend, self._wait) for f in families}[world.ranks]
            self._own.append(self.whole)
        self._aborted = False
        self._background: Any = None
        self.dense: Any = None
        self.dense_control: Any = None
        self.data: Any = None
        for fellow in world.fellows:
            self._fellow_groups(fellow, [f for f in families if set(f) <= set(fellow)])

    def _fellow_groups(self, fellow: Sequence[int], families: list[tuple[int, ...]]) -> None:
        if len({len(f) for f in families}) != 1 or sum(map(len, families)) != len(fellow):
            raise InvalidCluster(
                f"ranks {list(fellow)} do not divide into expert-parallel groups of one size: {families}; "
                f"give every rank a group of the same size"
            )
        group = self._wide_group(fellow)
        apart = self._world.backend != "gloo" or self._world.management is not None
        plain = self._control_group(fellow) if apart else group
        if dist.get_rank() in fellow:
            self.dense, self.dense_control = group, plain
            self._own += [group] if plain is group else [group, plain]
        for position in range(len(families[0]) if len(families) > 1 else 0):
            data = [f[position] for f in families]
            group = self._wide_group(data)
            if dist.get_rank() in data:
                self.data = group
                self._own.append(group)

    def _channels(self) -> Channels:
        world = self._world
        return Channels(
            world.families, world.rank, world.cluster, world.backend, self._wait, world.interfaces,
            self.control, world.management,
        )  # fmt: skip

    @property
    def behind(self) -> Channels:
        """What carries experts and their gradients behind the rows, where both on one communicator would wait for one another. Made
        when first used, by all ranks of the world at once."""
        if self._behind is None:
            self._behind = self._channels()
        return self._behind

    def retarget_behind(self, cluster: Cluster) -> None:
        if self._behind is not None:
            self._behind.retarget(cluster)

    @property
    def background(self) -> Any:
        """A gloo group of its own, for what runs behind the training and must never meet its collectives. Made when first
        used, by all ranks at once."""
        if self._background is None:
            self._background = dist.new_group(
                dist.get_process_group_ranks(self.dense_control),
                timeout=timedelta(seconds=self._wait),
                backend=shared_gloo(),
                use_local_synchronization=True,
            )
            self._own.append(self._background)
        return self._background

    def _control_group(self, ranks: Sequence[int]) -> Any:
        """For small values: on the management interface where there is one, so that no rail matters."""
        return make_group(ranks, "gloo", self._wait, self._world.management)

    def _wide_group(self, ranks: Sequence[int]) -> Any:
        """For gradients, between any ranks: each on its own rail, or on one that lives on every node."""
        world = self._world
        if world.interfaces is None:
            return make_group(ranks, world.backend, self._wait)
        rails = np.min([c.rails.min(axis=0) for c in world.families.values()], axis=0)
        shared = world.cluster.but(rails=np.broadcast_to(rails, world.cluster.rails.shape))
        return own_rail_group(world, ranks, common_rail(shared, world.cluster.nic(world.rank)[1]))

    def warm(self, device: torch.device, note: Callable[[Any], None]) -> None:
        """One tiny collective on each group that carries rows: connections and communicators exist before the first step."""
        self.channels.warm(device, note)
        if self._unplanned:
            work: Any = dist.all_reduce(torch.ones(1, device=device), group=self.whole, async_op=True)
            note(work)
            work.wait()

    def abort(self) -> None:
        """The groups on a device, after a fault: nobody waits any longer for who is gone. Theirs is the end of the yard."""
        self._aborted = True
        behind = [] if self._behind is None else self._behind.groups
        wide = (self.whole, self.dense, self.data)
        mine = [*self.channels.groups, *behind, *(group for group in wide if group is not None)]
        abort_groups(mine, device_of(self._world.backend))

    def close(self) -> None:
        if self._aborted or not dist.is_initialized():
            return  # to destroy what was aborted may wait for ever; and the caller may have destroyed all of them
        self.channels.close()
        if self._behind is not None:
            self._behind.close()
        for group in self._own:
            dist.destroy_process_group(group)


def own_rail_group(world: World, ranks: Sequence[int], rail: int | None) -> Any:
    """A group that this rank joins on the interface of this rail; None: on the management interface, if there is one."""
    wait = longest_wait(world.timeout)
    if world.interfaces is None:
        return make_group(ranks, world.backend, wait)
    return make_group(
        ranks, world.backend, wait, world.management if rail is None else world.interfaces[rail]
    )
