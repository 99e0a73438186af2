"""What the ranks do in test_folders.py: Hugging Face folders in and out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import small_models as small
import torch
import torch.distributed as dist

import moeyard as my
import moeyard.runtime as yr
from moeyard.runtime.weights.tensor_files import TensorFiles

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
UNEVEN = np.array([1, 0, 1, 1, 0, 1])


def prepare():
    import transformers

    for family in FAMILIES:
        transformers.AutoModelForCausalLM._model_mapping[type(small.config_of(family))]
    cluster = one_node(2)
    demand = my.Demand(np.full((2, 6), 3))
    traffic = my.assign(cluster, demand, my.place(cluster, demand, "static", None)).traffic(64)
    my.lower(my.schedule(cluster, traffic, "direct"), 0)


def one_node(ranks):
    return my.Cluster(1, ranks, scale_up=my.Port(5e10, 1e-6), scale_out=my.Port(1e10, 1e-5))


def write(rank, world, folder):
    """Plain transformers writes: one file, or several for the second family."""
    for family in FAMILIES:
        model = small.model_of(family, torch.float32, seed=3, tie_word_embeddings=family == "qwen3_moe")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(torch.rand_like(parameter))
        model.save_pretrained(f"{folder}/{family}", max_shard_size="20KB" if family == "qwen3_moe" else "1GB")


def through(rank, world, folder):
    """Folder -> ranks -> folder -> plain transformers: the same bits and logits. Returns what each rank read."""
    from transformers import AutoModelForCausalLM

    found = {}
    with yr.Yard(scheduler="direct", cluster=one_node(world), timeout=60) as yard:
        for family in FAMILIES:
            source, target = f"{folder}/{family}", f"{folder}/out-{family}"
            plain = AutoModelForCausalLM.from_pretrained(source)
            model = yr.from_pretrained(source, yard, homes=UNEVEN if family == "mixtral" else None)
            assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
            tokens = small.tokens_of(5)
            wrong = differences(plain, model)
            assert not wrong, f"{family}: {wrong}"
            with torch.no_grad():
                error = (plain(tokens).logits - model(tokens).logits).abs().max()
            assert error < 1e-5, f"{family}: {error}"
            yr.export_pretrained(model, target, yard, shard_bytes=20_000)
            again = AutoModelForCausalLM.from_pretrained(target)
            with torch.no_grad():
                assert (plain(tokens).logits == again(tokens).logits).all(), family
            assert list(again.state_dict()) == list(plain.state_dict())
            if family != "gpt_oss":  # saved in the layout that it came in
                assert set(TensorFiles(source)) == set(TensorFiles(target)), family
            found[family] = shares(model, source, yard)
    return found


def differences(plain, model):
    """Plain names whose bits on this rank are not those of the plain model."""
    whole, wrong, cut = plain.state_dict(), [], set()
    for name, module in yr.expert_modules(model):
        share = module.expert_share
        for stack in share.stacks:
            cut.add(f"{name}.{stack.name}")
            local = getattr(module, stack.name)
            for place, e in enumerate(share.own):
                key, part = stack.place(e)
                expected = whole[f"{name}.{key}"]
                expected = expected if part is None else expected[part]
                if not torch.equal(expected.reshape(local[place].shape), local[place]):
                    wrong.append(f"{name}.{key} of expert {e}")
    for name, tensor in model.state_dict().items():
        if name not in cut and isinstance(tensor, torch.Tensor) and not torch.equal(whole[name], tensor):
            wrong.append(name)
    return wrong


def shares(model, source, yard):
    """(bytes that this rank read, bytes of its parameters, bytes of the folder's tensors)."""
    read = yr.load_pretrained(model, source, yard).bytes_read
    own = sum(
        p.numel() * p.element_size()
        for p in {id(p): p for p in model.state_dict(keep_vars=True).values()}.values()
    )
    files = Path(source).glob("*.safetensors")
    total = sum(_data_bytes(file) for file in files)
    return read, own, total


def _data_bytes(file):
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return max(one["data_offsets"][1] for name, one in header.items() if name != "__metadata__")


def trained(rank, world, folder):
    """A model trained with replicas, exported from 4 ranks as EP 2 x DP 2: plain transformers gives its logits."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    cluster = one_node(2)
    with yr.Yard(mesh, scheduler="direct", cluster=cluster, planner="quota", slots=1, timeout=60) as yard:
        model = yr.parallelize(small.model_of("mixtral"), yard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for seed in range(2):
            loss, count = small.loss_sum(model, small.share_of(small.tokens_of(seed), rank, world))
            yr.global_mean(loss, count, yard).backward()
            yr.sync_gradients(model, yard)
            optimizer.step()
            optimizer.zero_grad()
        yr.export_pretrained(model, f"{folder}/trained", yard)
        plain = AutoModelForCausalLM.from_pretrained(
            f"{folder}/trained", dtype=torch.float64, experts_implementation="eager"
        )
        tokens = small.tokens_of(9)
        with torch.no_grad():
            return float((plain(tokens).logits - model(tokens).logits).abs().max())


def faults(rank, world, folder):
    """Every wrong folder is one line that names it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from moeyard.errors import MoeyardError

    messages = {}

    def attempt(name, path, **options):
        config = AutoConfig.from_pretrained(f"{folder}/mixtral", **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        yr.parallelize(model, yard)
        try:
            yr.load_pretrained(model, path, yard)
        except MoeyardError as error:
            messages[name] = str(error)

    broken = Path(folder) / f"broken{rank}"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"not at all")
    cut = Path(folder) / f"cut{rank}"
    cut.mkdir()
    whole = (Path(folder) / "mixtral" / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with yr.Yard(scheduler="direct", cluster=one_node(world), timeout=60) as yard:
        attempt("no folder", f"{folder}/nowhere")
        attempt("not safetensors", str(broken))
        attempt("cut short", str(cut))
        attempt("another width", f"{folder}/mixtral", hidden_size=32)
        attempt("more layers", f"{folder}/mixtral", num_hidden_layers=3)
        attempt("fewer layers", f"{folder}/mixtral", num_hidden_layers=1)
        dist.barrier()
    return messages
