"""Shared by the benchmarks: Markdown tables, and a main() that measures parts and writes them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import torch

ROOT = Path(__file__).resolve().parent.parent
README = [ROOT / "README.md", ROOT / "docs" / "README.zh-CN.md"]


def spread(rows: list[dict], name: str, digits: int = 3, scale: float = 1.0) -> str:
    """Median (lowest-highest) of a field."""
    values = [row[name] * scale for row in rows]
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def groups(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows by the values of these fields, in the order in which they come."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


class Benchmark:
    """Parts that measure, tables made from their rows, and the pages where the tables stand."""

    def __init__(
        self,
        name: str,
        parts: dict[str, Callable[[], list[dict]]],
        tables: dict[str, tuple[list[str], Callable[[list[dict]], str]]],
        docs: list[str],
    ) -> None:
        self.results_path = ROOT / "benchmarks" / "results" / f"{name}.json"
        self.pages = [*(ROOT / "docs" / page for page in docs), *README]
        self.parts, self.tables = parts, tables

    def results(self) -> dict:
        path = self.results_path
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def render(self, page: str, results: dict) -> str:
        """The page with every table between its marks made from the results."""
        for name, (parts, make) in self.tables.items():
            if all(part in results for part in parts):
                text = make([row for part in parts for row in results[part]])
                marks = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
                page = re.sub(marks, lambda m, t=text: m[1] + t + "\n" + m[2], page, flags=re.S)
        return page

    def write_tables(self) -> None:
        results = self.results()
        for page in self.pages:
            text = self.render(page.read_text(encoding="utf-8"), results)
            page.write_text(text, encoding="utf-8")

    def measure(self, part: str) -> None:
        start = time.perf_counter()
        rows = self.parts[part]()
        results = self.results()  # another part may have ended meanwhile
        results[part] = rows
        results.setdefault("machine", {})[part] = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gymnasium": gym.__version__,
            "minutes": (time.perf_counter() - start) / 60,
        }
        self.results_path.parent.mkdir(exist_ok=True)
        text = json.dumps(results, indent=1) + "\n"
        self.results_path.write_text(text, encoding="utf-8")

    def main(self, about: str) -> None:
        parser = argparse.ArgumentParser(description=about.splitlines()[0])
        parser.add_argument("parts", nargs="*", choices=[*self.parts, []], help="default: all")
        parser.add_argument("--tables", action="store_true", help="only write the tables anew")
        args = parser.parse_args()
        for part in [] if args.tables else args.parts or self.parts:
            self.measure(part)
            self.write_tables()
        self.write_tables()
