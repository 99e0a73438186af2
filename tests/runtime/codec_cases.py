"""What the ranks do in test_codec.py: four of them, two datacenters of two."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from bench import replica_training as training
from bench.replica_training import Case

import moeyard as my
import moeyard.runtime as yr
from moeyard.runtime.layers import coded

PLAIN = Case("adamw", "plain", "float32", 1, 1, False)


def cluster_of(world):
    port = my.Port(50e9, 1e-6)
    return my.Cluster(2, world // 2, port, port, datacenters=2, wan=my.Port(1e9, 1e-3))


def prepare():
    training.prepare(4)


def everything(rank, world, exact, near, cases):
    """Those of the below that are in `cases`, on one yard: a codec is chosen, and chosen again."""
    with yr.Yard(cluster=cluster_of(world), scheduler="direct", timeout=60, checked=True) as yard:

        def exactly(yard):
            return [both(yard, "lossless", Case(*case), **options) for case, options in exact]

        def nearly(yard):
            return {codec: both(yard, codec, Case(*case)) for codec, case in near.items()}

        every = {"exact": exactly, "near": nearly} | {
            case.__name__: case for case in (corrupted, damaged, replaced, again, healed, slower)
        }
        return {name: case(yard) for name, case in every.items() if name in cases}


def both(yard, codec, case, ahead=True, resident=True):
    """(losses without a codec, with it, what it sent, copies compared)."""
    steps = 8
    yard.choose(codec=None, ahead=ahead, resident=resident)
    plain = training.losses(yard, case, True, steps)
    yard.choose(codec=codec)
    before, sent = yard.workspace.compared, yard.workspace.tally.copy()
    found = training.losses(yard, case, True, steps)
    yard.choose(ahead=True, resident=True)
    return plain, found, dict(yard.workspace.tally - sent), yard.workspace.compared - before


def layer_of(yard, hidden=32):
    router = training.Turning(0, 4)
    torch.manual_seed(0)
    return yr.MoELayer(hidden, hidden, 4, 1, yard, router=router)


def step(layer, optimizer, yard, x):
    loss = ((layer(x) - 1) ** 2).mean()
    loss.backward()
    yr.sync_gradients(layer, yard)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def rows_of(rank, hidden=32):
    return torch.randn(16, hidden, generator=torch.Generator().manual_seed(rank))


def corrupted(yard):
    """{what is wrong with the messages of step 4: experts mended in each step}."""
    kept, found = coded.seal, {}

    def flipped(words, version, kind):
        kept(words, version, kind)
        words[7] ^= 1 << 3

    def old(words, version, kind):
        kept(words, version - 1, kind)

    for name, seal in {"a bit": flipped, "a version": old}.items():
        yard.choose(codec="bits:1@all", **training.REPLICAS)
        layer, x, mended = layer_of(yard), rows_of(yard.rank), []
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        for at in range(6):
            before = yard.workspace.tally["mended"]
            coded.seal = seal if yard.rank == 0 and at == 4 else kept  # of rank 0's own experts
            step(layer, optimizer, yard, x)
            mended.append(yard.workspace.tally["mended"] - before)
        found[name] = mended
    return found


def damaged(yard):
    """{codec: experts mended in each step, where the first anchor of rank 0 is damaged on its way}; what is said where all its anchors are;
    and the loss of a step after that."""
    kept, found = coded.sign, {}

    def flipped(anchor):
        kept(anchor)
        if yard.rank == 0 and wrong:
            anchor[wrong.pop()] += 1

    coded.sign = flipped
    try:
        for codec in ("bits:1", "lossless@all"):
            yard.choose(codec=codec, **training.REPLICAS)
            layer, x, mended = layer_of(yard), rows_of(yard.rank), []
            optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
            for at in range(3):
                wrong, before = [5] if at == 0 else [], yard.workspace.tally["mended"]
                step(layer, optimizer, yard, x)
                mended.append(yard.workspace.tally["mended"] - before)
            found[codec] = mended
        yard.choose(**training.REPLICAS)
        layer, wrong = layer_of(yard), [5] * 100
        try:
            step(layer, optimizer, yard, x)
        except yr.Mismatch as error:
            found["twice"] = str(error), error.ranks
        wrong = []
        found["after"] = step(layer_of(yard), optimizer, yard, x)
    finally:
        coded.sign = kept
    return found


def replaced(yard):
    """Masters drawn anew between two steps, as by loading: experts mended then."""
    yard.choose(codec="pick:16", **training.REPLICAS)
    layer, x = layer_of(yard), rows_of(yard.rank)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(4):
        step(layer, optimizer, yard, x)
    before = yard.workspace.tally["mended"]
    layer.reset(7)
    step(layer, optimizer, yard, x)
    return yard.workspace.tally["mended"] - before


def slower(yard):
    """A wan that slows down between two steps: (anchors, messages) that this rank sends in the next one."""
    yard.choose(codec="bits:1", **training.REPLICAS)
    layer, x, cluster = layer_of(yard), rows_of(yard.rank), yard.cluster
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(4):
        step(layer, optimizer, yard, x)
    before = yard.workspace.tally.copy()
    yard.set_cluster(cluster.but(wan=my.Port(1e8, 1e-3)))
    step(layer, optimizer, yard, x)
    sent = yard.workspace.tally - before
    yard.set_cluster(cluster)
    return sent["anchors"], sent["messages"]


def again(yard):
    """Several forwards on the same parameters: whether what is hosted has the bits of the first; then after a step."""
    yard.choose(codec="bits:1", **training.REPLICAS)
    layer, x, found = layer_of(yard), rows_of(yard.rank), []
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(4):
        step(layer, optimizer, yard, x)
    for _ in range(3):
        layer(x).sum().backward()
        found.append(hosted(yard, layer))
    layer.zero_grad()
    step(layer, optimizer, yard, x)
    layer(x)
    found.append(hosted(yard, layer))
    return [torch.equal(found[0], one) for one in found[1:]]


def healed(yard):
    """An expert that is no number in one place for one forward, as after a bad step: whether all that is hosted is finite then, and after."""
    found = {}
    for codec in ("bits:1", "pick:8", "topk:8", "residual:4"):
        yard.choose(codec=codec, **training.REPLICAS)
        layer, x = layer_of(yard), rows_of(yard.rank)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        for _ in range(3):
            step(layer, optimizer, yard, x)
        stack = next(one for one in layer.parameters() if one.ndim == 3)
        kept = stack.detach().clone()
        with torch.no_grad():
            stack.view(-1)[5] = float("nan")
            layer(x)
            wrong = int((~hosted(yard, layer).isfinite()).sum())
            stack.copy_(kept)
            layer(x)
        found[codec] = wrong, int((~hosted(yard, layer).isfinite()).sum())
    return found


def hosted(yard, layer):
    """All that this rank holds for the layer, flat."""
    kept = yard.workspace._buffers.items()
    return torch.cat([one.flatten() for (key, _, _), one in kept if key.startswith(f"layer {layer.site}/")])


@contextmanager
def two_layers(world, codec):
    """(a yard, two layers, their optimizer): every copy is compared with what its home says, before every use."""
    options = {"scheduler": "direct", "timeout": 60, "checked": True, "codec": codec}
    with yr.Yard(cluster=cluster_of(world), **options, **training.REPLICAS) as yard:
        layers = torch.nn.Sequential(layer_of(yard), layer_of(yard))
        yield yard, layers, torch.optim.AdamW(layers.parameters(), lr=1e-3)


def trained(rank, world, codec, folder, first, last, save=None):
    """(losses, anchors of all ranks, step by step; copies compared): from a checkpoint, where not from the start."""
    with two_layers(world, codec) as (yard, layers, optimizer):
        if first:
            assert yr.load_checkpoint(folder, layers, optimizer, yard).step == first - 1
        losses, anchors = [], []
        for at in range(first, last):
            before = yard.workspace.tally["anchors"]
            losses.append(step_all(layers, optimizer, yard))
            anchors.append(int(yard.control.gather([yard.workspace.tally["anchors"] - before]).sum()))
            if at == save:
                yr.save_checkpoint(folder, layers, optimizer, yard, step=at)
        return losses, anchors, yard.workspace.compared


def gone_back(rank, world, codec, folder):
    """(losses after a checkpoint, and each time after going back to it; copies compared; experts mended after each of the times)."""
    with two_layers(world, codec) as (yard, layers, optimizer):
        for _ in range(4):
            step_all(layers, optimizer, yard)
        yr.save_checkpoint(folder, layers, optimizer, yard, step=3)
        losses, mended = [], []
        for _ in range(3):
            before = yard.workspace.tally["mended"]
            losses.append([step_all(layers, optimizer, yard) for _ in range(4)])
            mended.append(yard.workspace.tally["mended"] - before)
            yr.load_checkpoint(folder, layers, optimizer, yard)
        return losses, yard.workspace.compared, mended


def room(rank, world, codecs):
    """{codec: (bytes that the yard says its copies take at most, that they take after two steps, that it says all that is kept of experts
    takes; experts that crossed the wan)}."""
    found = {}
    for codec in codecs:
        with two_layers(world, codec) as (yard, layers, optimizer):
            said = yard.memory(layers, 16, 1, 32, torch.float32)
            for _ in range(2):
                step_all(layers, optimizer, yard)
            taken = 0
            for chain in yard.workspace.chains.values():
                arrays = [getattr(one, "held", getattr(one, "halves", None)) for one in chain.copies.values()]
                shared = {
                    id(one.shared): one.shared for one in chain.copies.values() if hasattr(one, "shared")
                }
                taken += sum(one.nbytes for one in (*arrays, *shared.values()))
            crossed = int(yard.control.gather([yard.workspace.tally["crossed"]]).sum())
            found[codec] = said.copies, taken, said.most - 3 * said.most_rows * said.row_bytes, crossed
    return found


def step_all(layers, optimizer, yard):
    """A step on the same 64 rows, however many ranks there are; the mean of all ranks' losses."""
    each = 4 // yard.size
    x = torch.cat([rows_of(each * yard.rank + part) for part in range(each)])
    return float(yard.control.gather([int(step(layers, optimizer, yard, x) * 1e9)]).mean() / 1e9)
