"""Every number, table and picture of the docs, made again: all parts of all benchmarks.

Run:  python benchmarks/run_all.py              everything, one part after the other
      python benchmarks/run_all.py --list       the parts, with the minutes they took last time
      python benchmarks/run_all.py --tables     only write the tables anew, from results/*.json

Each part is a process of its own, so that its memory is free again when it ends; the first that
fails ends everything. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from common import ROOT, Benchmark  # noqa: E402

NAMES = ("frozen_lake", "cartpole", "text_env", "oracle", "rlhf", "museum", "exercises", "curves")


def benchmarks() -> list[Benchmark]:
    return [importlib.import_module(name).BENCHMARK for name in NAMES]


def commands() -> list[tuple[str, float | None]]:
    """Every part's command with its minutes (None: not measured); the pictures come last."""
    found = []
    for benchmark in benchmarks():
        machine = benchmark.results().get("machine", {})
        for part in benchmark.parts:
            minutes = machine.get(part, {}).get("minutes")
            found.append((f"benchmarks/{benchmark.name}.py {part}", minutes))
    return [*found, ("benchmarks/figures.py", None)]


def run_all() -> int:
    start = time.perf_counter()
    for command, _ in commands():
        print(command, flush=True)
        begin = time.perf_counter()
        code = subprocess.run([sys.executable, *command.split()], cwd=ROOT).returncode
        if code:
            print(f"failed: python {command} (exit {code})")
            return 1
        print(f"{(time.perf_counter() - begin) / 60:.1f} minutes", flush=True)
    print(f"all: {(time.perf_counter() - start) / 60:.0f} minutes")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only show the parts and their minutes")
    parser.add_argument("--tables", action="store_true", help="only write the tables anew")
    args = parser.parse_args()
    if args.list:
        found = commands()
        for command, minutes in found:
            print("     -" if minutes is None else f"{minutes:6.1f}", f" python {command}")
        print(f"{sum(minutes or 0 for _, minutes in found):6.1f}  in all")
        return 0
    if args.tables:
        for benchmark in benchmarks():
            benchmark.write_tables()
        return 0
    return run_all()


if __name__ == "__main__":
    sys.exit(main())
