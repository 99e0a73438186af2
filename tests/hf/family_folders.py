"""One family: plain folder -> two ranks, built empty -> exported folder -> plain model, compared bit by bit."""

from __future__ import annotations

import shutil
import tempfile

import families
import torch
import torch.distributed as dist
from folder_cases import differences, one_node

import moeyard.runtime as yr


def prepare():
    import transformers.modeling_utils  # noqa: F401


def family(rank, world, name):
    """(bytes read here, bytes of this rank's share)."""
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    source, target = f"{box[0]}/plain", f"{box[0]}/exported"
    torch.manual_seed(5)
    plain = families.FAMILIES[name].build()
    with torch.no_grad():
        for parameter in plain.parameters():  # nothing stays at ones or zeros, where a swap would not show
            parameter.add_(torch.rand_like(parameter) * 0.1)
    if rank == 0:
        plain.save_pretrained(source)
    dist.barrier()
    try:
        plain = type(plain).from_pretrained(source)
    except AttributeError as error:
        raise AssertionError(f"plain transformers does not open its own folder: {error}") from error
    with yr.Yard(scheduler="direct", cluster=one_node(world), timeout=40) as yard:
        config = type(plain.config).from_pretrained(source)
        with torch.device("meta"):
            model = type(plain)._from_config(config)
        yr.parallelize(model, yard)
        loaded = yr.load_pretrained(model, source, yard)
        assert not any(p.is_meta for p in (*model.parameters(), *model.buffers())), "left on the meta device"
        wrong = differences(plain, model)
        assert not wrong, f"loaded otherwise than plain transformers: {wrong[:3]}"
        buffers = dict(plain.named_buffers())
        wrong = [n for n, b in model.named_buffers() if n in buffers and not torch.equal(b, buffers[n])]
        assert not wrong, f"buffers differ: {wrong[:3]}"
        own = sum(t.numel() * t.element_size() for t in {id(t): t for t in state(model).values()}.values())
        yr.export_pretrained(model, target, yard, shard_bytes=50_000)
        again = type(plain).from_pretrained(target)
        first, second = plain.state_dict(), again.state_dict()
        assert list(first) == list(second), "the exported folder has other tensors"
        wrong = [n for n in first if not torch.equal(first[n], second[n])]
        assert not wrong, f"exported otherwise: {wrong[:3]}"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    return loaded.bytes_read, own


def state(model):
    return {
        name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)
    }
