"""pagedllm and its peers in turn, on the same workloads: ratios, a table, a plot.

    python benchmarks/compare_peers.py --peers DIR --workloads w1 w2 --against vllm llamacpp

DIR is where the peers' benchmark was set up (``scripts/run.sh`` runs a peer). For each workload
and peer both sides run one after the other, ``--rounds`` times, each in a process of its own; the
ratio is that of the medians over all their repetitions, above 1 where pagedllm is ahead. Every
process's JSON line is appended to ``--out``. Leave the machine alone meanwhile.

Beside the peers' own workloads there are ``b1``, ``b4`` ...: that many requests at once, of 32
tokens in and 128 out, for ``--plot``.

With ``--busy`` another process keeps the last of the processors busy meanwhile, as a neighbour on a
shared machine does.

Quantised: ``--ours "--quantization int8" --theirs "--weights int8"`` (OpenVINO).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
# What a workload is judged by, and whether more is better.
METRICS = {
    "w1": [("out_tok_s", True)],
    "w2": [("tok_s", True)],
    "w3": [("ttft_ms", False)],
    "w4": [("wall_s", False)],
    "w5": [("ttft_p99_ms", False), ("itl_p99_ms", False)],
    "cold": [("cold_start_s", False)],
}


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder of the peers' benchmark")
    parser.add_argument("--workloads", nargs="+", default=["w1", "w2", "w3", "w4"])
    parser.add_argument("--against", nargs="+", default=["vllm"], metavar="PEER")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--reps", type=int, default=3, help="repetitions in a process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side")
    parser.add_argument("--ours", default="", help="more options of bench_pagedllm.py")
    parser.add_argument("--theirs", default="", help="more options of the peer")
    parser.add_argument("--busy", action="store_true", help="keep one processor busy meanwhile")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a process")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "peers.jsonl")
    parser.add_argument("--plot", type=Path, help="draw throughput by batch size from --out")
    args = parser.parse_args()
    if args.peers is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        for workload in args.workloads:
            _make_batch(args.peers, workload)
            for peer in args.against:
                _compare(args, workload, peer)
    if args.plot is not None:
        _plot(args.out, args.plot)
    return 0


def _compare(args: argparse.Namespace, workload: str, peer: str) -> None:
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for _ in range(args.rounds):
        runs["ours"].append(_run(args, workload, None))
        runs["theirs"].append(_run(args, workload, peer))
    for name, more in METRICS.get(workload, [("out_tok_s", True)]):
        ours, theirs = (statistics.median(_values(r, name)) for r in runs.values())
        ratio = ours / theirs if more else theirs / ours
        print(
            f"{args.model} {workload} {name} {args.ours} against {peer} {args.theirs}"
            f"{' beside a busy process' * args.busy}: "
            f"{ours:.1f} and {theirs:.1f}: {ratio:.2f} times",
            flush=True,
        )


def _values(runs: list[dict[str, Any]], name: str) -> list[float]:
    """All repetitions of a figure where they are recorded, else each process's median."""
    values: list[float] = []
    for run in runs:
        values += run.get(f"all_{name}") or [run.get("median", run).get(name, run.get(name))]
    return values


def _run(args: argparse.Namespace, workload: str, peer: str | None) -> dict[str, Any]:
    """Run one side in a process of its own and record its line."""
    options = [workload, "--model", args.model, "--reps", str(args.reps)]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PEERS": str(args.peers)}
    if peer is None:
        script = str(HERE / "bench_pagedllm.py")
        command = [sys.executable, script, *options, *shlex.split(args.ours)]
    else:
        command = ["bash", str(args.peers / "scripts" / "run.sh"), peer, *options]
        command += shlex.split(args.theirs)
    with _neighbour() if args.busy else contextlib.nullcontext():
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=args.timeout,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{shlex.join(command)} gave no result:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    found["processor"], found["busy"] = _processor(), args.busy
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    return found


@contextlib.contextmanager
def _neighbour() -> Iterator[None]:
    """Keep the last of this process's processors busy."""
    last = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{last}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


def _processor() -> str:
    """Name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = re.search(r"model name\s*: (.*)", text)
    numbers = re.search(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)", text)
    shown = names[1] if names else platform.machine()
    return f"{shown} (family {numbers[1]}, model {numbers[2]})" if numbers else shown


def _make_batch(peers: Path, workload: str) -> None:
    """Write the workload ``b<size>`` from the tokens of w1, where it is not there yet."""
    if not re.fullmatch(r"b\d+", workload):
        return
    path = peers / "workloads" / f"{workload}.json"
    if path.exists():
        return
    size = int(workload[1:])
    source = json.loads((peers / "workloads" / "w1.json").read_text(encoding="utf-8"))
    variants = []
    for variant in source["variants"]:
        tokens = [token for request in variant for token in request["prompt"]]
        starts = range(0, 32 * size, 32)
        prompts = [(tokens * (1 + 32 * size // len(tokens)))[s : s + 32] for s in starts]
        variants.append([{"prompt": prompt, "out": 128, "at": 0.0} for prompt in prompts])
    path.write_text(json.dumps({"variants": variants}), encoding="utf-8")


def _plot(results: Path, target: Path) -> None:
    """Draw output tokens a second by batch size, a line for each engine."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines: dict[str, dict[int, list[float]]] = {}
    for text in results.read_text(encoding="utf-8").splitlines():
        run = json.loads(text)
        if re.fullmatch(r"b\d+", run["workload"]):
            method = run["opts"].get("quantization") or run["opts"].get("weights") or ""
            name = f"{run['peer']} {method}".strip()
            size = int(run["workload"][1:])
            lines.setdefault(name, {}).setdefault(size, []).append(run["median"]["out_tok_s"])
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, by_size in sorted(lines.items()):
        sizes = sorted(by_size)
        medians = [statistics.median(by_size[size]) for size in sizes]
        axes.plot(sizes, medians, marker="o", label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({size for by_size in lines.values() for size in by_size})
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_xlabel("requests at once (32 tokens in, 128 out)")
    axes.set_ylabel("output tokens a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
