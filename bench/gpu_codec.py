"""Encode and decode of experts on a GPU: checked against the slow reference, then timed against a copy.

    python -m bench.gpu_codec [--json]

Bytes: master (float32) and what is held read, what is held and the message written; what is held and the message read, what is held
and bf16 weights written. Over the time of both, against a device-to-device copy of float32, bytes read and written. Exit status 1 if a
message is not the reference's, or a codec is below its goal.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import torch
from tests.slow_codec import BLOCK, slow_block, slow_scale

from moeyard.runtime.codec.spec import HEAD, Codec

CODECS = ("bits:1", "bits:2", "pick:4", "pick:8", "pick:16", "pick:32")
GOAL = 0.4  # of the copy's bandwidth
EXPERTS, WIDTH = 32, 3 * 4096 * 2048


def flaws(name, device, width=2500):
    """What is not as the reference has it."""
    from moeyard.runtime.codec.launch import launch

    codec, rng, found = Codec.parse(name), np.random.default_rng(0), []
    master = rng.normal(0, 0.05, (3, width)).astype(np.float32)
    before = (master + rng.normal(0, 1e-3, master.shape)).astype(np.float32)
    rows = torch.tensor([[2, 1, 0], [0, 2, 1]], device=device)
    sender, receiver = (torch.tensor(before, device=device) for _ in range(2))
    words = torch.zeros((2, codec.words(width)), dtype=torch.int32, device=device)
    weights = torch.zeros((3, width), dtype=torch.bfloat16, device=device)
    launch(codec, True, torch.tensor(master, device=device), sender, words, rows)
    launch(codec, False, weights, receiver, words, rows)
    blocks = -(-width // BLOCK)
    body = words.shape[1] - HEAD - (blocks + 1) // 2
    for own, copy, i in rows.tolist():
        e = np.zeros(blocks * BLOCK, np.float32)
        e[:width] = master[own] - before[copy]
        scales = words[i].view(torch.bfloat16).float().cpu().numpy()[2 * (HEAD + body) :][:blocks]
        parts = [
            slow_block(codec.kind, codec.number, *one)
            for one in zip(e.reshape(blocks, BLOCK), scales, strict=True)
        ]
        wanted = [
            slow_scale(codec.kind, codec.number, block, min(BLOCK, width - at * BLOCK))
            for at, block in enumerate(e.reshape(blocks, BLOCK))
        ]
        if not np.allclose(scales, wanted, rtol=2**-7):
            found.append("scale")
        if (
            words[i, HEAD : HEAD + body].cpu().numpy().view(np.uint32)
            != np.concatenate([p[0] for p in parts])
        ).any():
            found.append("words")
        after = before[copy] + np.concatenate([p[1] for p in parts])[:width]
        # Two bits: a product and a sum may be rounded as one.
        if np.abs(sender[copy].cpu().numpy() - after).max() > (1e-8 if name == "bits:2" else 0):
            found.append("held")
        if not torch.equal(sender[copy], receiver[copy]) or not torch.equal(
            weights[own], receiver[copy].bfloat16()
        ):
            found.append("decoded")
    return found


def timed(name, device):
    import triton

    from moeyard.runtime.codec.launch import launch

    codec = Codec.parse(name)
    master = torch.randn(EXPERTS, WIDTH, device=device) * 0.05
    held = master + 1e-3 * torch.randn_like(master)
    weights = torch.empty(EXPERTS, WIDTH, device=device, dtype=torch.bfloat16)
    words = torch.zeros((EXPERTS, codec.words(WIDTH)), dtype=torch.int32, device=device)
    rows = torch.arange(EXPERTS, device=device)[:, None].expand(EXPERTS, 3).contiguous()

    def median(call):
        return triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median") / 1e3

    encode = median(lambda: launch(codec, True, master, held, words, rows))
    decode = median(lambda: launch(codec, False, weights, held, words, rows))
    copy = median(lambda: held.copy_(master))
    values, size = EXPERTS * WIDTH, words.numel() * 4
    rate, of_copy = (22 * values + 2 * size) / (encode + decode), 8 * values / copy
    return {
        "codec": name,
        "encode_s": encode,
        "decode_s": decode,
        "bytes_per_s": rate,
        "copy_bytes_per_s": of_copy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    device, failed = torch.device("cuda"), False
    for name in CODECS:
        row = timed(name, device) | {"flaws": flaws(name, device), "device": torch.cuda.get_device_name()}
        share = row["bytes_per_s"] / row["copy_bytes_per_s"]
        failed |= bool(row["flaws"]) or share < GOAL
        print(
            json.dumps(row) if as_json else f"{name}: {share:.2f} of a copy, flaws {row['flaws'] or 'none'}"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
