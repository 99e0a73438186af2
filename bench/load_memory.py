"""Peak memory of each rank while a model too large for one is built empty, cut and filled from a Hugging Face folder.

python -m bench.load_memory [--ranks 4] [--layers 3] [--experts 16] [--width 2048] [--document]

--document writes the figures of docs/checkpoints.md.

Every rank is a fresh process. Its base, subtracted, is what it holds after making the yard and loading a model of one layer and 16
values' width in the same way: imported code, no weights to speak of. The peak is the kernel's high-water mark of resident memory
(VmHWM, reset before the build), which counts mapped files too. torch asks for huge pages (2 MB): a tensor of a few megabytes takes up to two more
of them, which the figure for the same tensors merely allocated shows; the narrower the model, the more it counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = "MOEYARD_DOCUMENT"  # tells rank 0 to write the page


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def write_folder(folder: str, layers: int, experts: int, width: int) -> None:
    """By plain transformers: per-expert tensors, in files of 200 MB."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    MixtralForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="200MB")


def one_rank(folder: str) -> None:
    import torch
    import torch.distributed as dist
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401  not part of the load

    import moeyard.runtime as yr

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with yr.Yard() as yard:
        yr.from_pretrained(f"{folder}-small", yard)
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        base = resident("VmRSS")
        model = yr.from_pretrained(folder, yard)
        peak = resident("VmHWM")
        held = {p.data_ptr(): p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers())}
        own = sum(held.values())
        shapes = [(p.shape, p.dtype) for p in model.parameters()]
        del model
        gc.collect()
        before = resident("VmRSS")
        same = [torch.empty(shape, dtype=dtype).fill_(1) for shape, dtype in shapes]
        bare = resident("VmRSS") - min(before, base)
        del same
        found = {"rank": yard.rank, "base": base, "peak": peak, "own": own, "bare": bare}
        box = [None] * yard.size
        dist.all_gather_object(box, found)
        if yard.rank == 0:
            report(folder, box)
    dist.destroy_process_group()


def report(folder: str, ranks: list) -> None:
    whole = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    print(f"model on disk: {whole / 1e6:.0f} MB; base subtracted: code and yard, after loading a tiny model")
    for one in ranks:
        one["ratio"] = (one["peak"] - one["base"]) / one["own"]
        print(
            f"rank {one['rank']}: share {one['own'] / 1e6:.1f} MB, peak {(one['peak'] - one['base']) / 1e6:.1f} MB over a base of "
            f"{one['base'] / 1e6:.0f} MB: {one['ratio']:.3f} x its share (the same tensors merely allocated: "
            f"{one['bare'] / one['own']:.3f} x)"
        )
    print(json.dumps({"worst": max(one["ratio"] for one in ranks), "ranks": ranks}))
    if os.environ.get(DOCUMENT):
        sys.path.insert(0, str(ROOT))
        from bench.document import write_figures

        worst = max(ranks, key=lambda one: one["ratio"])
        said = (
            f"{worst['ratio']:.2f} x its share at most (Mixtral of {whole / 1e9:.1f} GB in bf16, {len(ranks)} ranks; fresh processes, base subtracted); "
            f"the same tensors merely allocated take {worst['bare'] / worst['own']:.2f} x, in huge pages"
        )
        write_figures("docs/checkpoints.md", "load", said)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--layers", type=int, default=3)
    options.add_argument("--experts", type=int, default=16)
    options.add_argument("--width", type=int, default=2048)
    options.add_argument("--folder", help=argparse.SUPPRESS)
    options.add_argument("--document", action="store_true")
    given = options.parse_args()
    if "RANK" in os.environ:
        one_rank(given.folder)
        return 0
    with tempfile.TemporaryDirectory() as top:
        folder = f"{top}/model"
        sizes = [(folder, given.layers, given.experts, given.width), (f"{folder}-small", 1, given.ranks, 16)]
        code = f"from bench.load_memory import write_folder\nfor size in {sizes}: write_folder(*size)"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        environment |= {DOCUMENT: "1"} if given.document else {}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(given.ranks)]
        return subprocess.run(
            [*command, "--standalone", __file__, "--folder", folder], env=environment, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
