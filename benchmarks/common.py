"""Shared by the benchmarks: Markdown tables, and a main() that measures parts and writes them."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import gymnasium as gym
import torch

ROOT = Path(__file__).resolve().parent.parent
README = [ROOT / "README.md", ROOT / "docs" / "README.zh-CN.md"]
RESULTS = ROOT / "docs" / "results.md"  # where every part of every benchmark is listed

MACHINE = (
    "Python {python}, torch {torch}, gymnasium {gymnasium}; {cpu}, {cores} cores, "
    "{threads} of them used by torch"
)


def cpu_name() -> str:
    """The model, where the system tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


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


@contextmanager
def edited(module, name: str, *edits: tuple[str, str]) -> Iterator[None]:
    """A function, or Class.method, in its place with each old in its source replaced by new."""
    *owner, attribute = name.split(".")
    holder = getattr(module, owner[0]) if owner else module
    source = textwrap.dedent(inspect.getsource(getattr(holder, attribute)))
    for old, new in edits:
        assert source.count(old) == 1, f"no longer once in {name}: {old}"
        source = source.replace(old, new)
    exec(compile(source, f"<{name}>", "exec"), vars(module), space := {})
    with mock.patch.object(holder, attribute, space[attribute]):
        yield


class Benchmark:
    """Parts that measure, tables made from their rows, and the pages where the tables stand."""

    def __init__(
        self,
        name: str,
        parts: dict[str, Callable[[], list[dict]]],
        tables: dict[str, tuple[list[str], Callable[[list[dict]], str]]],
        docs: list[str],
    ) -> None:
        self.name, self.parts, self.tables = name, parts, tables
        self.results_path = ROOT / "benchmarks" / "results" / f"{name}.json"
        self.pages = [*(ROOT / "docs" / page for page in docs), RESULTS, *README]

    def results(self) -> dict:
        path = self.results_path
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def render(self, page: str, results: dict) -> str:
        """The page with every table between its marks made from the results."""
        texts = {f"results_{self.name}": self.table_parts(results)}
        for name, (parts, make) in self.tables.items():
            if all(part in results for part in parts):
                texts[name] = make([row for part in parts for row in results[part]])
        for name, text in texts.items():
            marks = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
            page = re.sub(marks, lambda m, t=text: m[1] + t + "\n" + m[2], page, flags=re.S)
        return page

    def where(self, part: str) -> str:
        """Links from docs/results.md to the pages on which a table of this part stands."""
        marks = [
            f"<!-- table {name} -->" for name, (parts, _) in self.tables.items() if part in parts
        ]
        found = []
        for page in self.pages:
            text = page.read_text(encoding="utf-8")
            if page != README[1] and any(mark in text for mark in marks):
                link = Path(os.path.relpath(page, RESULTS.parent)).as_posix()
                found.append("this page" if page == RESULTS else f"[{page.stem}]({link})")
        return ", ".join(found) if marks else "pictures"

    def table_parts(self, results: dict) -> str:
        """What each part measures, how to run it, the minutes it took, where its tables stand."""
        body, machines = [], {}
        for part, function in self.parts.items():
            about = (function.__doc__ or "").split("\n")[0].rstrip(".")
            facts = results.get("machine", {}).get(part, {})
            took = f"{facts['minutes']:.1f}" if facts else "not yet run"
            command = f"`python benchmarks/{self.name}.py {part}`"
            body.append([about, command, took, self.where(part)])
            if facts:
                machines.setdefault(MACHINE.format(**facts), []).append(part)
        text = table(["what is measured", "command", "minutes", "tables on"], body)
        for machine, parts in machines.items():
            names = "All parts" if len(machines) == 1 else ", ".join(parts)
            text += f"\n\n{names}: {machine}."
        return text

    def write_tables(self) -> None:
        results = self.results()
        for page in self.pages:
            old = page.read_text(encoding="utf-8")
            new = self.render(old, results)
            if new != old:
                page.write_text(new, encoding="utf-8")

    def measure(self, part: str) -> None:
        start = time.perf_counter()
        rows = self.parts[part]()
        results = self.results()  # another part may have ended meanwhile
        results[part] = rows
        results.setdefault("machine", {})[part] = {
            "cpu": cpu_name(),
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
