"""Where a figure comes from: a value that travels with it, from where it is made to where it is printed and into JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moeyard.errors import InvalidFile, MoeyardError


class Source(StrEnum):
    """How a figure was found."""

    MEASURED = "measured"
    MODELLED = "modelled"
    PUBLISHED = "published"
    UNSTATED = "not stated"  # only by files of 0.1, which did not say


class Network(StrEnum):
    """What the rows crossed."""

    SHAPED = "shaped"
    LOOPBACK = "loopback"
    CLUSTER = "cluster"
    SIMULATED = "simulated"


MEANING = {
    Source.MEASURED: "taken with a clock or counted while it ran",
    Source.MODELLED: "worked out, not observed",
    Source.PUBLISHED: "as printed in a paper",
    Source.UNSTATED: "from a file of an earlier version, which did not say",
    Network.SHAPED: "real bytes crossed a shaped network on one machine",
    Network.LOOPBACK: "real bytes stayed on one machine, on a network that nobody shaped: exchange times are those of its memory",
    Network.CLUSTER: "real bytes crossed the network of a cluster",
    Network.SIMULATED: "no byte moved: the flow simulator's network",
}
EMULATED = "emulated accelerator"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a figure comes from. Combinations that would be a lie cannot be made."""

    source: Source
    network: Network | None = None  # None: no network has a part in the figure
    emulated: bool = (
        False  # compute times in it are those of an emulated accelerator: real maths, then a wait
    )
    paper: str = ""  # where a published figure is printed

    def __post_init__(self) -> None:
        if self.source is Source.MEASURED and self.network is Network.SIMULATED:
            raise MoeyardError("a figure of a simulated network is modelled, not measured")
        if (self.source is Source.PUBLISHED) != bool(self.paper):
            raise MoeyardError(
                f"published is what a paper prints, and names it; got source {self.source.value} and paper {self.paper!r}"
            )

    @classmethod
    def measured(cls, network: Network | None = None, *, emulated: bool = False) -> Provenance:
        return cls(Source.MEASURED, network, emulated)

    @classmethod
    def modelled(cls, network: Network | None = None) -> Provenance:
        """With `Network.SIMULATED`: by the flow simulator. Without a network: in closed form."""
        return cls(Source.MODELLED, network)

    @classmethod
    def published(cls, paper: str) -> Provenance:
        return cls(Source.PUBLISHED, paper=paper)

    def __str__(self) -> str:
        """`measured, shaped network, emulated accelerator`."""
        network = "" if self.network is None else f"{self.network.value} network"
        return ", ".join(filter(None, (self.source.value, network, EMULATED * self.emulated, self.paper)))

    @property
    def meaning(self) -> str:
        """What the words stand for, as a sentence for whoever asks."""
        parts = [MEANING[self.source]]
        if self.network is not None:
            parts.append(MEANING[self.network])
        if self.emulated:
            parts.append("compute times are those of an emulated accelerator: real maths, then a wait")
        return "; ".join(parts)

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "source": self.source.value,
            "network": None if self.network is None else self.network.value,
            "emulated": self.emulated,
        } | ({"paper": self.paper} if self.paper else {})

    @classmethod
    def read(cls, data: Any, place: str) -> Provenance:
        """What `data` gave. A figure that does not say where it comes from is an error that names it."""
        try:
            network = data["network"]
            return cls(
                Source(data["source"]),
                None if network is None else Network(network),
                bool(data.get("emulated", False)),
                str(data.get("paper", "")),
            )
        except (KeyError, TypeError, AttributeError, ValueError, MoeyardError) as error:
            raise InvalidFile(
                f"{place}: does not say where it comes from (source, network): {error}; write the file anew with this version"
            ) from error


SIMULATED = Provenance.modelled(Network.SIMULATED)  # by the flow simulator
CLOSED_FORM = Provenance.modelled()  # by estimate, bound, step_cost
UNSTATED = Provenance(Source.UNSTATED)
CLOCKED = Provenance.measured()  # on this machine, no network in it


def by_source(figures: Iterable[tuple[str, Provenance]]) -> dict[Provenance, str]:
    """Each provenance once, with the names of what it is of; no names where it is of everything."""
    named: dict[Provenance, list[str]] = {}
    for name, provenance in figures:
        own = named.setdefault(provenance, [])
        if name not in own:
            own.append(name)
    return {one: "" if len(named) == 1 else ", ".join(names) for one, names in named.items()}


def data_of(figures: Mapping[str, Provenance]) -> dict[str, Any]:
    """Key of a figure -> its provenance, as JSON has it."""
    return {key: provenance.data() for key, provenance in figures.items()}
