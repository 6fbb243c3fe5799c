"""Peak memory while a sharded checkpoint is loaded, as a multiple of its weights.

    python benchmarks/load_memory.py
    python benchmarks/load_memory.py --gigabytes 4 --dtype float16 --tiers generic

Writes a Llama of random weights in shards into a temporary folder, loads it once in each tier
in a process of its own and prints one line of JSON. ``ratio`` is the growth of the process's
peak resident memory (``VmHWM``: pages of mapped files count) over what it held with all modules
imported, divided by the size of the weights; ``held`` is the same for what stays. A checkpoint
that is converted on the way (``--load-dtype``) has more pages mapped than it leaves behind, which
the system takes back when it needs them. Linux only.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint")
    parser.add_argument("--dtype", default="bfloat16", help="of the checkpoint")
    parser.add_argument("--load-dtype", default="auto", help="that it is loaded in")
    parser.add_argument("--tiers", nargs="+", default=["native", "generic"])
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(_load(args.folder, args.tiers[0], args.load_dtype)))
        return

    import torch
    import transformers

    import pagedllm

    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), args.gigabytes, getattr(torch, args.dtype))
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        shards = len(list(Path(folder).glob("*.safetensors")))
        tiers = {tier: _measure(folder, tier, args.load_dtype) for tier in args.tiers}
    report = {
        "benchmark": "load_memory",
        "checkpoint_bytes": size,
        "shards": shards,
        "dtype": args.dtype,
        "load_dtype": args.load_dtype,
        "tiers": tiers,
        "processor": platform.processor() or platform.machine(),
        "pagedllm": pagedllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(report))


def _write(folder: Path, gigabytes: float, dtype: Any) -> None:
    """Write a Llama with about that many bytes of weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, vocab = 1024, 2816, 32_000 if gigabytes >= 1 else 4_000
    layer = (4 * width * width + 3 * width * inner) * dtype.itemsize
    head = 2 * vocab * width * dtype.itemsize
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=max(1, round((gigabytes * 1e9 - head) / layer)),
        num_attention_heads=16,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.save_pretrained(folder, max_shard_size=f"{round(gigabytes * 125)}MB")


def _measure(folder: str, tier: str, dtype: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--folder", folder, "--tiers", tier]
    done = subprocess.run(
        [*command, "--load-dtype", dtype], check=True, capture_output=True, text=True
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{tier}: peak {report['ratio']:.2f} times the weights", flush=True)
    return report


def _load(folder: str, tier: str, dtype: str) -> dict[str, Any]:
    """Load a model in this process and say what it took."""
    # Whatever the first load in a process imports and compiles is no part of the weights.
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    from pagedllm.models import load_model

    stored = json.loads((Path(folder) / "config.json").read_text())["dtype"]
    with tempfile.TemporaryDirectory() as tiny:
        _tiny().to(getattr(torch, stored)).save_pretrained(tiny)
        load_model(tiny, model_impl=tier, dtype=dtype)
    for thread in threading.enumerate():
        if thread.name == "pagedllm-compile":  # beside the loading of weights
            thread.join()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin = time.perf_counter()
    model = load_model(folder, model_impl=tier, dtype=dtype)
    seconds = time.perf_counter() - begin
    peak, after = _status("VmHWM"), _status("VmRSS")
    return {
        "weight_bytes": model.weight_bytes,
        "seconds": round(seconds, 2),
        "peak_bytes": peak - before,
        "ratio": round((peak - before) / model.weight_bytes, 3),
        "held": round((after - before) / model.weight_bytes, 3),
    }


def _tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def _status(field: str) -> int:
    """Return a size of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


if __name__ == "__main__":
    main()
